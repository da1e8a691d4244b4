# SPDX-License-Identifier: Apache-2.0
"""Serves the demo: `python demo/app.py`, the same as `dspark-hf demo`; also the app file of a Hugging Face Space."""

import typer

from dspark_hf.cli.demo import demo_command


if __name__ == "__main__":
    typer.run(demo_command)
