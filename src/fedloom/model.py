"""A trained mixture, loaded from its folder: it answers, explains its gates, and can be measured on files."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from fedloom.adapters.inject import target_modules
from fedloom.adapters.moe_lora import Routing
from fedloom.adapters.peft_io import load_expert
from fedloom.adapters.state import Shapes, check_tensors, expected_shapes, place_expert
from fedloom.backbones.context import check_room
from fedloom.backbones.features import prompt_features
from fedloom.backbones.load import DTYPES, cache_dir, load_backbone
from fedloom.data.tokenize import encode_prompt, stop_tokens, tokenizer_hash
from fedloom.errors import AdapterError, ConfigError, ModelFolderError
from fedloom.evaluation.generate import greedy
from fedloom.evaluation.losses import loss_per_task
from fedloom.evaluation.scores import new_tokens, score_tasks
from fedloom.export import FORMAT
from fedloom.report.folder import a_model
from fedloom.runtime.client import Workbench
from fedloom.runtime.events import Observer
from fedloom.types import AdapterSpec, Plain, Tensors
from fedloom.workload import encode_tests, read_tests

#: See ``adapters.router.route``.
ROUTING = re.compile(r"soft|off|top[1-9]\d{0,3}")


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

    @property
    def native(self) -> bool:
        """Whether the experts are the backbone's own."""
        return bool(self.bench.grafted.spec.native)

    @property
    def has_gates(self) -> bool:
        """Whether experts are weighed by prompt, not for each token (by the backbone itself, or by slots)."""
        return not (self.native or self.bench.grafted.spec.slots)

    def gates(self, prompts: Sequence[str]) -> torch.Tensor:
        """Return the softmax gate of every expert for each prompt, (n, M); ones for a model with one expert.

        Raises:
            ConfigError: the experts are chosen for each token, see ``has_gates``.
        """
        if not self.has_gates:
            whose = "chooses its own experts" if self.native else "weighs its experts in each layer"
            raise ConfigError(f"This model {whose} for each token, so a prompt has no gates to explain.")
        gates = self._route([self._encode(p) for p in prompts], "soft")
        assert gates is not None
        return gates

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        routing: str | None = None,
        max_new_tokens: int = 128,
        say: Callable[[str], object] = warnings.warn,
    ) -> str | list[str]:
        """Answer one prompt, or a list of prompts, by greedy decoding.

        Args:
            prompt: the user's message, or several.
            routing: ``top1`` (only the best expert is active), ``top2``…, ``soft``, or ``off`` for the bare backbone;
                default as the model folder says.
            max_new_tokens: the most tokens of an answer.
            say: told of a prompt that is longer, with its answer, than what the backbone was trained on.

        Raises:
            ConfigError: a prompt is no text, or the backbone has too few positions for it and its answer.
        """
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = [self._encode(text, max_new_tokens, say) for text in texts]
        chosen = self._route(ids, checked_routing(routing or self.routing))
        tokenizer = self.bench.backbone.tokenizer
        answers = greedy(self.bench, ids, chosen, max_new_tokens, stop_tokens(tokenizer))
        decoded = [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]
        return decoded[0] if isinstance(prompt, str) else decoded

    def _encode(self, text: str, new_tokens: int = 0, say: Callable[[str], object] | None = None) -> list[int]:
        if not isinstance(text, str):
            raise ConfigError(
                f"a prompt is text, the user's message, but this one is of type {type(text).__name__}. Of messages "
                "with 'role' and 'content', give the content of the user's."
            )
        if not text.strip():
            raise ConfigError("the prompt is empty.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt is not valid UTF-8, at character {error.start + 1}.") from error
        ids = encode_prompt([("user", text)], self.bench.backbone.tokenizer)
        check_room(self.bench.backbone, len(ids), new_tokens, "Shorten the prompt, or ask for fewer new tokens.", say)
        return ids

    @torch.no_grad()
    def _route(self, ids: Sequence[Sequence[int]], mode: str) -> Routing:
        """Route each prompt by the frozen backbone's features of it."""
        grafted, backbone = self.bench.grafted, self.bench.backbone
        if grafted.router is None:
            features = torch.zeros(len(ids), backbone.hidden_size)
        else:
            with grafted.routing(None):
                features = prompt_features(backbone, ids)
        return grafted.route(features.to(backbone.device), mode)


def checked_routing(mode: str) -> str:
    """Return ``mode`` if it is one."""
    if not ROUTING.fullmatch(mode):
        raise ConfigError(f"Unknown routing {mode[:40]!r}. Use 'top1', 'top2', …, 'soft' or 'off'.")
    return mode


def load_model(
    folder: str | Path, *, backbone: str | None = None, dtype: str | None = None, device: str = "auto"
) -> LoadedModel:
    """Load a model folder.

    Args:
        folder: what ``fedloom run`` wrote to ``model/``.
        backbone: name or path of the backbone where it is not found under the recorded name; none for a model whose own
            experts were trained, which is in the folder whole.
        dtype: type of the backbone's parameters, default as the folder records; the hash is compared in that one. A
            model of own experts still chooses them in float32, as in training; one that was trained by ``lora`` in
            half precision is recorded as float32 and computes in its training's type what it computed there.
        device: see ``load_backbone``.

    Raises:
        ModelFolderError: something is missing, or the backbone is not the one the model was trained on.
    """
    folder = Path(folder)
    about = _read_about(folder)
    recorded = about["backbone"]
    spec = _checked_spec(folder, about)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    if spec.native and backbone is not None:
        raise ConfigError(f"{folder} holds its whole model, so it takes no other backbone: leave --backbone out.")
    own = str(folder / "backbone") if spec.native else None
    loaded = load_backbone(own or backbone or recorded["name"], dtype=recorded["dtype"], device=device)
    if loaded.hash != recorded["hash"]:
        if spec.native:
            raise ModelFolderError(
                f"{folder} was saved with hash {recorded['hash'][:12]}…, but the model in {own} has hash "
                f"{loaded.hash[:12]}…. It was changed since, or saved by another version of fedloom: take the folder "
                "that the run wrote and the version that fedloom.json names, or run again."
            )
        raise ModelFolderError(
            f"{folder} was trained on {recorded['name']!r} with hash {recorded['hash'][:12]}…, but the backbone found "
            f"has hash {loaded.hash[:12]}…. Give the right one with --backbone."
        )
    if tokenizer_hash(loaded.tokenizer) != recorded["tokenizer_hash"]:
        raise ModelFolderError(f"{folder} was trained with another tokenizer than {loaded.name!r} has.")
    if spec.native:
        if bad := [name for name, p in loaded.model.named_parameters() if not torch.isfinite(p).all()]:
            raise ModelFolderError(f"{folder}: {bad[0]!r} holds NaN or infinity. The model is damaged; train it again.")
        kind = DTYPES[dtype or recorded["dtype"]]
        return LoadedModel(about, Workbench(loaded, spec, cache_dir(), answers_in=kind))
    if dtype is not None:
        for parameter in loaded.model.parameters():  # not buffers: rotary frequencies are float32 in any model
            parameter.data = parameter.data.to(DTYPES[dtype])
    tensors = _stored_tensors(folder, spec, target_modules(loaded.model, spec.targets), loaded.hidden_size)
    bench = Workbench(loaded, spec, cache_dir())
    bench.load(tensors, spec)
    bench.grafted.eval()
    return LoadedModel(about, bench)


def _stored_tensors(folder: Path, spec: AdapterSpec, shapes: Shapes, hidden_size: int) -> Tensors:
    """Read what ``spec`` grafts; nothing is allocated for it before the files are known to hold it, all finite."""
    tensors: Tensors = {}
    for m in range(spec.experts):
        place = folder / "experts" / str(m)
        try:
            expert, fields = load_expert(place, shapes)
        except (RecursionError, ValueError, KeyError, TypeError) as error:
            raise ModelFolderError(f"{place} cannot be read: {type(error).__name__}: {error}.") from error
        if fields["r"] != spec.rank or fields["lora_alpha"] != spec.alpha:
            raise ModelFolderError(
                f"{place} has rank {fields['r']} and alpha {fields['lora_alpha']}, but fedloom.json says {spec.rank} "
                f"and {spec.alpha:g}."
            )
        tensors |= place_expert(expert, m)
    if not all(name.startswith("experts/") for name in expected_shapes(spec, shapes, hidden_size)):
        path = folder / "router.safetensors"
        try:
            router = load_tensors(path.read_bytes())
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ModelFolderError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error
        tensors |= {name if "/" in name else f"router/{name}": tensor.float() for name, tensor in router.items()}
    try:
        check_tensors(tensors, spec, shapes, hidden_size)
    except AdapterError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ModelFolderError(f"{folder}: {bad[0]!r} holds NaN or infinity. The model is damaged; train it again.")
    return tensors


def _checked_spec(folder: Path, about: dict[str, Any]) -> AdapterSpec:
    """Return the specification, refusing what no model has: a folder is input like any other."""
    path = folder / "fedloom.json"
    try:
        spec, backbone, experts = AdapterSpec.from_plain(about["adapter"]), about["backbone"], about["experts"]
        texts = ("name", "hash", "dtype", "tokenizer_hash")
        fields = (
            ("adapter.targets", all(isinstance(target, str) for target in spec.targets)),
            ("adapter.rank", _whole(spec.rank, 1, 65536)),
            ("adapter.experts", _whole(spec.experts, 1, 1024)),
            ("adapter.router_hidden", _whole(spec.router_hidden, 0, 65536)),
            ("adapter.routers", _whole(spec.routers, 1, 1024)),
            ("adapter.router_weights", _are_weights(spec.router_weights, spec.routers)),
            ("adapter.slots", len(spec.slots) <= 4096 and all(_whole(m, 0, spec.experts - 1) for m in spec.slots)),
            ("adapter.slot_top", _whole(spec.slot_top, 0, len(spec.slots))),
            ("adapter.centroids", isinstance(spec.centroids, bool)),
            ("adapter.base_delta", isinstance(spec.base_delta, bool)),
            ("adapter.native", spec.native in ("", "full", "lora")),
            ("adapter.kept", all(isinstance(unit, str) for unit in spec.kept)),
            ("adapter.blend", isinstance(spec.blend, bool)),
            ("adapter.alpha", isinstance(spec.alpha, int | float) and 0 < spec.alpha < 1e9),
            ("adapter.dropout", isinstance(spec.dropout, int | float) and 0 <= spec.dropout < 1),
            *((f"backbone.{key}", isinstance(backbone[key], str) and len(backbone[key]) < 1024) for key in texts),
            ("backbone.dtype", backbone["dtype"] in tuple(DTYPES)),
            ("experts", isinstance(experts, list) and len(experts) == spec.experts),
            *((f"experts[{m}]", _is_provenance(known)) for m, known in enumerate(experts)),
            ("max_length", _whole(about["max_length"], 1, 1 << 31)),
            ("routing", bool(ROUTING.fullmatch(about["routing"]))),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelFolderError(f"{path} lacks a field or has a wrong type: {error}.") from error
    if bad := [name for name, sane in fields if not sane]:
        raise ModelFolderError(f"{path}: {bad[0]!r} has a value that no model has.")
    return spec


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _are_weights(weights: Sequence[Any], count: int) -> bool:
    """Return whether these can be the weights of so many routers; none are all alike."""
    if not weights:
        return True
    sane = all(type(weight) in (int, float) and 0 <= weight < 1e300 for weight in weights)  # so that sums are finite
    return sane and len(weights) == count and sum(weights) > 0


def _is_provenance(known: Any) -> bool:
    """Return whether this can be what ``fedloom.json`` knows of an expert."""
    fits = isinstance(known, dict) and isinstance(known.get("buckets", {}), dict)
    return fits and _whole(known.get("examples", 0), 0, 1 << 60)


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "fedloom.json"
    if not path.is_file():
        inside = a_model(folder)
        hint = f" Did you mean {inside}?" if (inside / "fedloom.json").is_file() else ""
        raise ModelFolderError(f"{folder} is not a fedloom model: it has no fedloom.json.{hint}")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not JSON: {error}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        raise ModelFolderError(f"{path} has format {found!r}; this version of fedloom reads {FORMAT}.")
    if missing := {"backbone", "adapter", "routing", "experts", "max_length"} - about.keys():
        raise ModelFolderError(f"{path} lacks {', '.join(sorted(missing))}.")
    return about


def evaluate_files(
    folder: str | Path,
    files: Mapping[str, str | Path],
    *,
    routing: str | None = None,
    backbone: str | None = None,
    generate: bool = True,
    observer: Observer | None = None,
) -> dict[str, Plain]:
    """Measure a model folder on files of rows.

    Args:
        folder: the model.
        files: task name → file. Rows of a known task may have its own fields; all may have prompt and response.
        routing: default the model's own.
        backbone: see ``load_model``.
        generate: also generate and score.
        observer: told of progress.

    Returns:
        ``routing``, ``examples``, ``loss`` and ``score`` per task, with ``macro``.
    """
    observer = observer or Observer()
    if "macro" in files:
        raise ConfigError("'macro' cannot name a task: it stands for the mean over all tasks. Choose another name.")
    model = load_model(folder, backbone=backbone)
    mode = checked_routing(routing or model.routing)
    rows, examples, _ = encode_tests(read_tests(files), model.bench.backbone, model.about["max_length"], observer)
    if generate:
        for task, found in rows.items():
            longest = max((e.prompt_length for e in found.encoded), default=0)
            check_room(model.bench.backbone, longest, new_tokens(task), f"Leave {task} out, or measure the loss only.")
    count = sum(map(len, rows.values()))
    if model.bench.grafted.router is not None:
        observer.phase("features", count)
        for found_rows in rows.values():
            found_rows.features(model.bench, observer.advance)
    observer.phase("evaluation", count * (2 if generate else 1))
    losses = loss_per_task(model.bench, rows, mode, observer.advance)
    scores = score_tasks(model.bench, rows, examples, mode, observer.advance)[0] if generate else {}
    return {
        "routing": mode,
        "examples": {task: len(r) for task, r in rows.items()},
        "loss": losses,
        "score": scores,
    }
