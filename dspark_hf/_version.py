# SPDX-License-Identifier: Apache-2.0
"""The version of the package, read by the build and by `dspark_hf.__version__`."""

__version__ = "0.1.0.dev0"
