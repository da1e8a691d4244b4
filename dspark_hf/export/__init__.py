# SPDX-License-Identifier: Apache-2.0
"""Writes drafts in the layouts of other engines."""
