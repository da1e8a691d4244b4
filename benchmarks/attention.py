# SPDX-License-Identifier: Apache-2.0
"""Three ways to attend from a few new tokens of each text to its keys, where heads share keys and values.

    python benchmarks/attention.py

Microseconds of one layer. A pass goes over the keys and values of all layers, as one of the model does: what a cache
holds from the layer before is of no use to the next. The ways take turns, and medians are reported. The default is the
shape of the default target.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from dspark_hf.drafts.attention import eager_attention, folded_attention, folded_mask


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[1, 2, 6], help="of each row")
    parser.add_argument("--keys", type=int, default=352)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    return parser.parse_args()


def ways(rows: int, new_tokens: int, arguments: argparse.Namespace) -> dict[str, Callable[..., torch.Tensor]]:
    """Functions of keys and values."""
    dtype, groups = getattr(torch, arguments.dtype), arguments.heads // arguments.kv_heads
    query = torch.randn(rows, arguments.heads, new_tokens, arguments.width, dtype=dtype)
    visible = torch.ones(rows, 1, new_tokens, arguments.keys, dtype=torch.bool)
    visible[..., -3:] = False
    mask, scaling, module = folded_mask(visible, groups, dtype), arguments.width**-0.5, nn.Module().eval()

    def matmuls(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return eager_attention(module, query, key, value, visible, scaling)[0]

    def repeated(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        copies = [states.repeat_interleave(groups, dim=1) for states in (key, value)]
        return nn.functional.scaled_dot_product_attention(query, *copies, attn_mask=visible, scale=scaling)

    def folded(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return folded_attention(query, key, value, mask, scaling)

    return {"two matmuls": matmuls, "fused, heads repeated": repeated, "fused, heads folded": folded}


def main() -> None:
    arguments = parse_arguments()
    print(f"{arguments.dtype}, {arguments.keys} keys, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    header = None
    for rows in arguments.rows:
        for new_tokens in arguments.new_tokens:
            made = ways(rows, new_tokens, arguments)
            shape = (rows, arguments.kv_heads, arguments.keys, arguments.width)
            layers = torch.randn(arguments.layers, 2, *shape).to(getattr(torch, arguments.dtype))
            seconds: dict[str, list[float]] = {name: [] for name in made}
            for repeat in range(-1, arguments.repeats):  # the first warms up
                for name, attend in made.items():
                    start = time.perf_counter()
                    for key, value in layers:
                        attend(key, value)
                    if repeat >= 0:
                        seconds[name].append((time.perf_counter() - start) / len(layers))
            if header is None:
                header = "| rows | new tokens | " + " | ".join(made) + " |\n|" + "---:|" * (2 + len(made))
                print(header)
            cells = [f"{1e6 * statistics.median(own):.0f}" for own in seconds.values()]
            print(f"| {rows} | {new_tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
