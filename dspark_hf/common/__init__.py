# SPDX-License-Identifier: Apache-2.0
"""What every part uses: records, prompts, chats, files. Imports no other part of the package."""
