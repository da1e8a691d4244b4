# SPDX-License-Identifier: Apache-2.0
"""The draft models, the formats that they come in, and what they need to know of a target."""
