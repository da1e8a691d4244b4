# SPDX-License-Identifier: Apache-2.0
"""Shared by all parts: records, prompts, chats, files. Imports no other part of the package."""
