# SPDX-License-Identifier: Apache-2.0
"""Draft models, their checkpoint formats, and what they read from a target."""
