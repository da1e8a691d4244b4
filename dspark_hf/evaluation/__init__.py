# SPDX-License-Identifier: Apache-2.0
"""A target with one or several drafters, measured side by side on tasks, and a report of it."""
