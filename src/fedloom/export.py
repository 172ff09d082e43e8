"""The model folder: plain PEFT adapters, a router, and one JSON file that says what belongs together.

``experts/<m>/adapter_model.safetensors`` and ``adapter_config.json`` load with ``PeftModel.from_pretrained``;
``router.safetensors`` holds the router; ``fedloom.json`` the rest.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fedloom import __version__
from fedloom.adapters.peft_io import load_expert, save_expert
from fedloom.adapters.state import pick_expert, place_expert
from fedloom.backbones.features import DEFINITION, prompt_features
from fedloom.backbones.load import cache_dir, load_backbone
from fedloom.data.tokenize import encode_prompt, end_token_id, template_kind, tokenizer_hash
from fedloom.errors import ConfigError, ModelFolderError
from fedloom.evaluation.generate import greedy
from fedloom.files import sync_folder, write_atomic, write_json
from fedloom.runtime.client import Workbench
from fedloom.types import AdapterSpec, Plain, Tensors, View

FORMAT = 1


def save_model(
    folder: Path,
    view: View,
    bench: Workbench,
    *,
    provenance: dict[str, Plain],
    experts: Sequence[dict[str, Plain]] = (),
    routing: str = "top1",
) -> None:
    """Write a model folder; it appears whole or not at all, and replaces an older one.

    Args:
        folder: where.
        view: what evaluation sees: tensors and specification.
        bench: the backbone it was trained on.
        provenance: method, rounds, seed… of the run.
        experts: what is known of each expert (clients, buckets, examples).
        routing: default routing at inference.
    """
    backbone = bench.backbone
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        partial.chmod(0o755)
        for m in range(view.spec.experts):
            expert = pick_expert(view.tensors, m)
            save_expert(
                partial / "experts" / str(m),
                expert,
                view.spec,
                backbone=backbone.name,
                fan_in_fan_out=bench.grafted.fan_in_fan_out,
            )
        router = {n.removeprefix("router/"): t for n, t in view.tensors.items() if n.startswith("router/")}
        if router:
            write_atomic(partial / "router.safetensors", save_tensors(router))
        write_json(
            partial / "fedloom.json",
            {
                "format": FORMAT,
                "fedloom": __version__,
                "backbone": {
                    "name": backbone.name,
                    "hash": backbone.hash,
                    "model_type": backbone.config.model_type,
                    "hidden_size": backbone.hidden_size,
                    "tokenizer_hash": tokenizer_hash(backbone.tokenizer),
                    "template": template_kind(backbone.tokenizer),
                },
                "adapter": view.spec.to_plain(),
                "router": {"features": DEFINITION, "activation": "gelu", "hidden": view.spec.router_hidden}
                if router
                else None,
                "routing": routing,
                "experts": list(experts) or [{} for _ in range(view.spec.experts)],
                "provenance": provenance,
            },
        )
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
            folder.rename(old / folder.name)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass
class LoadedModel:
    """A trained mixture on its backbone, ready to answer.

    Attributes:
        about: the content of ``fedloom.json``.
        bench: backbone and graft.
    """

    about: dict[str, Any]
    bench: Workbench

    @property
    def routing(self) -> str:
        return str(self.about["routing"])

    def gates(self, prompts: Sequence[str]) -> torch.Tensor:
        """Return the softmax gate of every expert for each prompt, (n, M); ones for a model with one expert."""
        gates, _ = self._route([self._encode(p) for p in prompts], "soft")
        return gates

    def generate(
        self, prompt: str | Sequence[str], *, routing: str | None = None, max_new_tokens: int = 128
    ) -> str | list[str]:
        """Answer one prompt, or a list of prompts, by greedy decoding.

        Args:
            prompt: the user's message, or several.
            routing: ``top1`` (only the best expert is active), ``top2``…, ``soft``, or ``off`` for the bare backbone;
                default as the model folder says.
            max_new_tokens: the most tokens of an answer.
        """
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = [self._encode(text) for text in texts]
        _, chosen = self._route(ids, routing or self.routing)
        tokenizer = self.bench.backbone.tokenizer
        answers = greedy(self.bench, ids, chosen, max_new_tokens, [end_token_id(tokenizer)])
        decoded = [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]
        return decoded[0] if isinstance(prompt, str) else decoded

    def _encode(self, text: str) -> list[int]:
        if not text.strip():
            raise ConfigError("the prompt is empty.")
        return encode_prompt([("user", text)], self.bench.backbone.tokenizer)

    @torch.no_grad()
    def _route(self, ids: Sequence[Sequence[int]], mode: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        grafted, backbone = self.bench.grafted, self.bench.backbone
        if grafted.router is None:
            features = torch.zeros(len(ids), backbone.hidden_size)
        else:
            with grafted.routing(None):
                features = prompt_features(backbone, ids)
        features = features.to(backbone.device)
        gates = grafted.route(features, "soft")
        assert gates is not None
        return gates, grafted.route(features, mode)


def load_model(
    folder: str | Path, *, backbone: str | None = None, dtype: str = "auto", device: str = "auto"
) -> LoadedModel:
    """Load a model folder.

    Args:
        folder: what ``fedloom run`` wrote to ``model/``.
        backbone: name or path of the backbone where it is not found under the recorded name.
        dtype: see ``load_backbone``.
        device: see ``load_backbone``.

    Raises:
        ModelFolderError: something is missing, or the backbone is not the one the model was trained on.
    """
    folder = Path(folder)
    about = _read_about(folder)
    recorded = about["backbone"]
    loaded = load_backbone(backbone or recorded["name"], dtype=dtype, device=device)
    if loaded.hash != recorded["hash"] and dtype == "auto" and loaded.device.type == "cpu":
        raise ModelFolderError(
            f"{folder} was trained on {recorded['name']!r} with hash {recorded['hash'][:12]}…, but the backbone found "
            f"has hash {loaded.hash[:12]}…. Give the right one with --backbone."
        )
    if tokenizer_hash(loaded.tokenizer) != recorded["tokenizer_hash"]:
        raise ModelFolderError(f"{folder} was trained with another tokenizer than {loaded.name!r} has.")
    spec = AdapterSpec.from_plain(about["adapter"])
    bench = Workbench(loaded, spec, cache_dir())
    tensors: Tensors = {}
    for m in range(spec.experts):
        expert, fields = load_expert(folder / "experts" / str(m), bench.grafted.shapes)
        if fields["r"] != spec.rank or fields["lora_alpha"] != spec.alpha:
            raise ModelFolderError(
                f"{folder / 'experts' / str(m)} has rank {fields['r']} and alpha {fields['lora_alpha']}, but "
                f"fedloom.json says {spec.rank} and {spec.alpha:g}."
            )
        tensors |= place_expert(expert, m)
    if spec.router_hidden:
        try:
            router = load_tensors((folder / "router.safetensors").read_bytes())
        except (OSError, SafetensorError) as error:
            raise ModelFolderError(f"{folder / 'router.safetensors'} cannot be read: {error}.") from error
        tensors |= {f"router/{name}": tensor for name, tensor in router.items()}
    bench.load(tensors, spec)
    bench.grafted.eval()
    return LoadedModel(about, bench)


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "fedloom.json"
    if not path.is_file():
        raise ModelFolderError(f"{folder} is not a fedloom model: it has no fedloom.json.")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        raise ModelFolderError(f"{path} has format {found!r}; this version of fedloom reads {FORMAT}.")
    if missing := {"backbone", "adapter", "routing", "experts"} - about.keys():
        raise ModelFolderError(f"{path} lacks {', '.join(sorted(missing))}.")
    return about
