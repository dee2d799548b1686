"""Version 0: takes a Hugging Face folder as the first anchor of a run.

Kept apart from the anchors themselves, since judging a checkpoint against its configuration needs
transformers, and those who only read anchors do not. Only safetensors are read; pickled weights are
refused by name, never opened.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tasks.weights.anchors import asset_files, iter_safetensors, write_anchor
from tasks.weights.folders import MODEL_FILE, Publication

INDEX_FILE = "model.safetensors.index.json"


def import_anchor(hf_folder: str | Path, store_dir: str | Path, lease: int) -> Publication:
    """Publishes a Hugging Face folder as version 0.

    bf16 values are taken as they are and others rounded to nearest even, which the manifest notes
    as `rounded`; the configuration is rewritten to say bfloat16, so that engines load what the
    anchor holds.

    Raises:
        ValueError: the folder has no safetensors, lacks a tensor that its configuration needs, has
            one that it does not explain, or a file is truncated.
    """
    folder = Path(hf_folder).expanduser().absolute()
    files = check_checkpoint(folder)
    rounded = _any_rounded(files)
    with tempfile.TemporaryDirectory() as assets:
        for asset in asset_files(folder):
            shutil.copyfile(asset, Path(assets) / asset.name)
        config_path = Path(assets) / "config.json"
        config = json.loads(config_path.read_text())
        config.pop("torch_dtype", None)
        config_path.write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
        return write_anchor(
            store_dir,
            version=0,
            lease=lease,
            tensors=_bf16_tensors(files),
            assets_dir=assets,
            rounded=rounded,
        )


def check_checkpoint(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder that `import_anchor` would accept.

    Raises `ValueError` as `import_anchor` does.
    """
    files = _weight_files(folder)
    for file in files:
        for _ in iter_safetensors(file):
            pass
    _check_against_config(folder)
    return files


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, all present."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; pass a Hugging Face checkpoint folder.")
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text())
        files = sorted({folder / name for name in index["weight_map"].values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}; download the folder again.")
        return files
    if (folder / MODEL_FILE).is_file():
        return [folder / MODEL_FILE]
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise ValueError(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which can run code when "
            "opened and are never loaded; convert them with `save_pretrained` in an environment "
            "you trust."
        )
    raise ValueError(f"{folder} has no {MODEL_FILE}; pass a folder with safetensors weights.")


def _check_against_config(folder: Path) -> None:
    # Loading is the one judge of names that transformers renames or fuses on the way.
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.bfloat16, local_files_only=True
        )
    except RuntimeError as error:
        raise ValueError(f"{folder} does not fit its config.json: {error}") from error
    info = loaded[1]
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing or unexpected:
        raise ValueError(
            f"{folder} does not fit its config.json: missing tensors {missing or 'none'}, "
            f"unexpected tensors {unexpected or 'none'}; save the model again with "
            "`save_pretrained`."
        )


def _any_rounded(files: list[Path]) -> bool:
    """Reads every tensor; whether one holds a value that bf16 cannot."""
    rounded = False
    for file in files:
        for name, tensor in iter_safetensors(file):
            if not tensor.is_floating_point():
                raise ValueError(
                    f"{file} is quantized: {name} is {tensor.dtype}; pass a checkpoint with "
                    "floating-point weights."
                )
            rounded |= not torch.equal(tensor.to(torch.bfloat16).to(tensor.dtype), tensor)
    return rounded


def _bf16_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name, tensor in iter_safetensors(file):
            yield name, tensor.to(torch.bfloat16)
