"""Reads a model from disk: its architecture, its end tokens, and its tensors one at a time, with Hugging Face names.

GGUF stores the q and k rows of `llama` models in another order, and adds 1 to the weights of Gemma's norms.  This file
undoes both changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rooflab.engine.load.coded import Weight
from rooflab.engine.load.gguf_codes import KEPT_FORMATS, read_codes
from rooflab.engine.load.gguf_model import ROPE_FACTORS, GGUFModel
from rooflab.engine.load.model_files import check_model
from rooflab.engine.load.weights import parameter_shapes
from rooflab.roofline.architecture import Architecture, read_json

_SAMPLING = "general.sampling."


class GGUFCheckpoint:
    """Reads a model from a GGUF file.  Its tensors become fp32; on request, quantised matrices keep their codes."""

    def __init__(self, path: Path):
        self.path = path
        self._model = GGUFModel(path)
        self.architecture = self._model.architecture

    def ends(self) -> Mapping[str, Any]:
        """Maps the keys of the end-of-text, end-of-turn and end-of-message tokens to ids (None if not in the file)."""
        key_names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        return {name: self._model.fields.get(name) for name in key_names}

    def generation(self) -> tuple[str, Mapping[str, Any]]:
        """Returns the place of the sampling settings, for error messages, and the settings by transformers' names."""
        hf_names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
        settings = {
            name.removeprefix(_SAMPLING): value for name, value in self._model.fields.items() if _SAMPLING in name
        }
        return f"{self.path.name}, {_SAMPLING[:-1]}", {hf_names.get(name, name): settings[name] for name in settings}

    def plain_matrices(self) -> dict[str, str]:
        """Maps the names of matrices whose codes cannot be kept to the names of their formats."""
        from gguf import GGMLQuantizationType

        table = "token_embd.weight" if "output.weight" in self._model.tensors else ""  # no product takes it
        matrices = (x for x in self._model.tensors.values() if len(x.shape) == 2 and x.name != table)
        return {
            tensor.name: GGMLQuantizationType(tensor.kind).name
            for tensor in matrices
            if tensor.kind not in KEPT_FORMATS
        }

    def tensors(self, keep_codes: bool = False) -> Iterator[tuple[str, Weight]]:
        """Yields the Hugging Face name and the fp32 values of each tensor.  With `keep_codes`, a quantised matrix keeps
        its codes and scales if the engine can multiply by them."""
        from gguf import MODEL_ARCH, get_tensor_name_map

        arch, model_kind = self.architecture, self._model.kind
        gguf_names = get_tensor_name_map(MODEL_ARCH[str(model_kind).upper()], arch.num_layers)
        name_of = {gguf_names.get_name(name, (".weight", ".bias")): name for name in parameter_shapes(arch)}
        for tensor in self._model.tensors.values():
            if tensor.name == ROPE_FACTORS:
                continue
            name, num_heads = name_of.get(tensor.name, tensor.name), 0  # the loader refuses an unknown name
            if model_kind == "llama" and (".q_proj." in name or ".k_proj." in name):
                num_heads = arch.num_heads if ".q_proj." in name else arch.num_kv_heads
            if keep_codes and len(tensor.shape) == 2 and tensor.kind in KEPT_FORMATS:
                yield name, read_codes(tensor).in_rows(partial(_half_split, num_heads=num_heads))
                continue
            weight_values = _half_split(torch.from_numpy(tensor.values()), num_heads)
            if model_kind == "gemma" and name.endswith("norm.weight"):
                weight_values = weight_values - 1
            yield name, weight_values


def _half_split(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of each head, if any, from GGUF's order `[pairs, 2]` to Hugging Face's order `[2, pairs]`."""
    if not num_heads:
        return rows
    num_pairs = rows.shape[0] // num_heads // 2
    return rows.view(num_heads, num_pairs, 2, -1).transpose(1, 2).reshape(rows.shape)


def read_safetensors(
    file: Path, names: set[str] | None = None, option: str = "model"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors `names` of a safetensors file, or all its tensors if `names` is None.  Raises `ValueError` if
    the file is damaged or lacks one of `names`.  The error message begins with `option`, an option's name."""
    try:
        with safe_open(file, framework="pt") as tensor_file:
            stored_names = set(tensor_file.keys())
            if missing_names := sorted((names or set()) - stored_names):
                raise ValueError(f"{option}: {file.name} lacks {missing_names[0]!r}, which the index looks for there")
            for name in sorted(stored_names if names is None else names):
                yield name, tensor_file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{option}: {file.name} is not a whole safetensors file: {error}") from error


class SafetensorsCheckpoint:
    """Reads a model from a Hugging Face folder with config.json and one or more safetensors files."""

    def __init__(self, path: Path):
        self.path = path
        self.architecture = Architecture.from_config(path, name=path.absolute().name)
        self._config = read_json(path / "config.json")
        if quantisation := self._config.get("quantization_config"):
            quant_method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
            raise ValueError(f"model: quantization_config ({quant_method}) is not implemented; expected plain weights")
        self._files = self._files_of()

    def _files_of(self) -> dict[Path, set[str] | None]:
        """Maps each safetensors file to the names of the tensors to read from it.  None stands for all tensors.

        Reads only the first of these that exists, like transformers: `model.safetensors`, the files that the index
        lists, all `model*.safetensors`, all `*.safetensors`.  Other files may repeat the tensors."""
        single_file, index_file = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single_file.is_file():
            return {single_file: None}
        if not index_file.is_file():
            weight_files = sorted(self.path.glob("model*.safetensors")) or sorted(self.path.glob("*.safetensors"))
            if not weight_files:
                raise ValueError(f"model: {self.path} has a config.json but no *.safetensors")
            return dict.fromkeys(weight_files)
        file_of = read_json(index_file).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise ValueError(f"model: expected a weight_map of tensors to files in {index_file.name}")
        names_of: dict[Path, set[str] | None]
        names_of = {self.path / file: {name for name in file_of if file_of[name] == file} for file in file_of.values()}
        if missing_names := [file.name for file in names_of if not file.is_file()]:
            raise ValueError(f"model: {index_file.name} names {', '.join(missing_names)}, which is missing")
        return names_of

    def ends(self) -> Mapping[str, Any]:
        """Maps config.json and generation_config.json to their end tokens: an id, a list of ids, or None."""
        name, settings = self.generation()
        return {"config.json": self._config.get("eos_token_id"), name: settings.get("eos_token_id")}

    def generation(self) -> tuple[str, Mapping[str, Any]]:
        """Returns the name and fields of generation_config.json, or else of config.json (as transformers)."""
        file = self.path / "generation_config.json"
        return (file.name, read_json(file)) if file.is_file() else ("config.json", self._config)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each name and tensor in its stored dtype, except rotary frequencies, which config.json determines."""
        for file, names in self._files.items():
            for name, tensor in read_safetensors(file, names):
                if not name.endswith("rotary_emb.inv_freq"):
                    yield name, tensor


Checkpoint = GGUFCheckpoint | SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint at `path`: a GGUF file or a Hugging Face folder with safetensors.

    Raises `ValueError` if nothing exists at `path`, if the files are damaged, or if the architecture is unknown."""
    if path.is_file() and path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    check_model(str(path))
    return SafetensorsCheckpoint(path)
