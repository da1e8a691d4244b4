# SPDX-License-Identifier: Apache-2.0
"""Drafts in the layouts that other engines read."""
