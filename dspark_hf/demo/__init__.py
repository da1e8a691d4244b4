# SPDX-License-Identifier: Apache-2.0
"""The Gradio demo: one prompt without and with DSpark, side by side. Its modules need the `demo` extra."""
