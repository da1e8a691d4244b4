# SPDX-License-Identifier: Apache-2.0
"""Many clients at the demo at once: is one lost, does memory stay flat? `python benchmarks/demo_load.py`.

Starts `demo/app.py` on the default pair (further arguments go to it), lets 50 clients ask for one comparison each at
the same moment, several times over, and prints how many were answered and the server's memory after each wave. The
first wave fills caches; memory is compared from the second on.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from gradio_client import Client


APP = Path(__file__).parents[1] / "demo" / "app.py"
PROMPT = "Name three fruits."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=4)
    args, server_arguments = parser.parse_known_args()

    port = _free_port()
    server = subprocess.Popen([sys.executable, str(APP), "--port", str(port), *server_arguments])
    try:
        url = f"http://127.0.0.1:{port}"
        print(f"serving after {_wait_until_up(url, server):.1f} s, {_megabytes(server):.0f} MB")
        for wave in range(args.waves):
            start = time.perf_counter()
            with ThreadPoolExecutor(args.clients) as pool:
                answers = list(pool.map(lambda _: _ask(url, args.max_new_tokens), range(args.clients)))
            lost = [answer for answer in answers if answer != "done"]
            print(
                f"wave {wave + 1}: {len(answers) - len(lost)} of {len(answers)} answered, {len(lost)} lost, "
                f"{time.perf_counter() - start:.1f} s, {_megabytes(server):.0f} MB"
            )
            for reason in sorted(set(lost)):
                print(f"  {reason}")
    finally:
        server.terminate()
        server.wait(timeout=30)


def _ask(url: str, max_new_tokens: int) -> str:
    """ "done", or why there was no answer."""
    try:
        # Patient: the clients of this script share one machine with the server.
        client = Client(url, verbose=False, httpx_kwargs={"timeout": 600})
        return client.predict(PROMPT, max_new_tokens=max_new_tokens, api_name="/compare")["phase"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _megabytes(server: subprocess.Popen) -> float:
    return psutil.Process(server.pid).memory_info().rss / 1e6


def _wait_until_up(url: str, server: subprocess.Popen) -> float:
    start = time.perf_counter()
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return time.perf_counter() - start
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"The demo ended with exit status {server.returncode} before it served anything.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
