"""`grpo-rl import-gguf FILE.gguf FOLDER`: a GGUF model as a Hugging Face folder."""

from __future__ import annotations

import io
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import grpo_rl
from grpo_rl.arguments import Arguments
from grpo_rl.checkpoint.files import entry_of
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.machine_memory import machine_memory
from grpo_rl.models.load import parameters_on_meta
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.telemetry.terminal.text import safe_text

DTYPES = ("float32", "bfloat16")
MAX_PARTS = 8_000_000  # of the header at most; 260,000 tokens with merges have 2 million
_CARD = """\
---
{metadata}---

# {name}

Imported by `grpo-rl import-gguf` of grpo_rl {version} from `{file}` (SHA-256 `{sha256}`).

- **Weights**: dequantized from {types} to {dtype}; {parameters:,} parameters, `{architecture}`. What quantization took away is not
  brought back.
- **Source**: {source}
- **Licence**: {license}, as the file says; it is the licence of the model, and holds for this folder too.
"""


def main(argv: Sequence[str]) -> int:
    """Raises ConfigError as `read_header` and `import_gguf`."""
    options = _parser().read(argv)
    folder = Path(options.folder).expanduser()
    file = read_header(Path(options.file).expanduser())
    with closing(Console()) as console:
        console.info(
            f"{file.name}: {file.architecture}, {file.blocks} layers, {file.numbers / 1e6:,.1f} M numbers in {file.types}"
        )
        with console.progress(f"dequantizing to {options.dtype}"):
            import_gguf(file, folder, options.dtype)
        console.info(f"written: {folder} (model, tokenizer, README.md with licence and source: {file.license})")
        console.info(f"to train it: python -m grpo_rl.main actor_rollout_ref.model.path={shlex.quote(str(folder))} ...")
    return 0


@frozen
class GgufFile:
    path: Path
    architecture: str
    name: str
    license: str
    source: str
    types: str  # of tensors, that of most numbers first: `Q4_1, F32`
    numbers: int
    blocks: int


def read_header(path: Path) -> GgufFile:
    """Raises ConfigError for a file that is missing, broken, or shorter than it says."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        """The library's reader takes what lies beyond the end as empty, as often as the file says."""

        parts = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            self.parts += 1
            if self.parts > MAX_PARTS:
                raise ValueError(f"its header has more than {MAX_PARTS:,} parts")
            part = super()._get(offset, dtype, count, override_order)
            if len(part) < int(count):
                raise ValueError(
                    f"it ends at byte {len(self.data):,}, and names {int(count):,} numbers from {int(offset):,} on"
                )
            return part

    with _readable(path), np.errstate(all="ignore"):
        reader = BoundedReader(path)

        def text(key: str) -> str:
            field = reader.get_field(key)
            return "" if field is None else safe_text(str(field.contents()), limit=200)

        architecture = text("general.architecture")
        blocks = reader.get_field(f"{architecture}.block_count")
        numbers = Counter[str]()
        for tensor in reader.tensors:
            numbers[tensor.tensor_type.name] += int(tensor.n_elements)
        layers = 0 if blocks is None else int(blocks.contents())
        if not 0 < layers <= len(reader.tensors):
            raise ValueError(f"it says {layers:,} layers and has {len(reader.tensors):,} tensors")
        if (scaling := text(f"{architecture}.rope.scaling.type")) not in ("", "none"):
            raise ValueError(f"its rotary embeddings are scaled ({scaling}), which transformers does not take over from GGUF")
        sources = [text(f"general.{key}") for key in ("organization", "basename", "source.url", "repo_url", "url")]
        return GgufFile(
            path,
            architecture,
            text("general.name") or path.stem,
            text("general.license") or "unknown",
            ", ".join(filter(None, sources)) or "the file names none",
            ", ".join(kind for kind, _ in numbers.most_common()),
            sum(numbers.values()),
            layers,
        )


def import_gguf(file: GgufFile, folder: Path, dtype: str) -> Path:
    """Write the Hugging Face folder whole, and return it. Raises ConfigError for an existing folder, a family
    that transformers does not read from GGUF, weights that do not make up the model, and too little memory or
    disk."""
    width = 4 if dtype == "float32" else 2
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already; give a new folder")
    # The library dequantizes into float32 beside the file.
    needed, free = 4 * file.numbers + file.path.stat().st_size, machine_memory().free
    if needed > free:
        raise ConfigError(
            f"{file.path}: reading it takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
        )
    tokenizer, model = _read(file, getattr(torch, dtype))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        room = os.statvfs(folder.parent)
        if width * file.numbers > room.f_bavail * room.f_frsize:
            raise ConfigError(f"{folder}: takes {width * file.numbers / 1e9:.1f} GB, and the disk has less")
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            fresh = Path(scratch) / folder.name
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
            metadata = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": file.license}
            card = _CARD.format(
                metadata=yaml.safe_dump(metadata, sort_keys=False),
                license=file.license,
                name=file.name,
                version=grpo_rl.__version__,
                file=safe_text(file.path.name),
                sha256=entry_of(file.path.resolve())[1],
                types=file.types,
                dtype=dtype,
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                architecture=type(model).__name__,
                source=file.source,
            )
            (fresh / "README.md").write_text(card, encoding="utf-8")
            os.replace(fresh, folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder


def _read(file: GgufFile, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return tokenizer and model, whose config has no trace of quantization: it could not be saved."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place, name = str(file.path.parent), file.path.name
    with _readable(file.path):
        config = AutoConfig.from_pretrained(place, gguf_file=name, local_files_only=True)
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config)
        described = sum(parameter.numel() for parameter in model.parameters())
        # transformers leaves out what it does not know, such as factors of scaled rotary embeddings.
        if described != file.numbers:
            raise ValueError(
                f"transformers reads its settings as {described:,} parameters, and it has {file.numbers:,} numbers"
            )
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name, local_files_only=True)
        with redirect_stderr(io.StringIO()):  # transformers draws a bar in any case
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place, gguf_file=name, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
        read, report = loaded
        lacking = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
        if lacking:
            raise ValueError(f"{len(lacking)} weights are missing or of another shape, e.g. {lacking[0]}")
        model.load_state_dict(read.to(dtype).state_dict(), assign=True)
        model.tie_weights()
        model.config.dtype = dtype
        model.generation_config = read.generation_config
        tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    return tokenizer, model


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise ConfigError for whatever gguf and transformers raise."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"{path}: reading GGUF needs the package gguf, which is not installed ({error})") from error
    except Exception as error:
        why = safe_text(" ".join(str(error).split()) or type(error).__name__, limit=300)
        raise ConfigError(f"{path}: cannot be read as a GGUF model that transformers knows: {why}") from error


def _parser() -> Arguments:
    parser = Arguments(
        "import-gguf",
        "Make a Hugging Face folder of a GGUF file, which training and vLLM read: dequantized weights, tokenizer, chat template,\n"
        "generation settings, and a card with licence and source. Families: llama, qwen2, qwen3, and what else transformers reads.",
        "grpo-rl import-gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2",
    )
    parser.add_argument("file", metavar="FILE.gguf", help="the GGUF file; one file, not split into parts")
    parser.add_argument("folder", metavar="FOLDER", help="a new folder")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="type of the weights (float32)")
    return parser
