# SPDX-License-Identifier: Apache-2.0
"""`python -m dspark_hf` is `dspark-hf`."""

from .cli import app


app()
