"""The readers of text from outside, each as a function of bytes that raises when it is broken: for fuzzers.

Whatever comes in, each either works or raises one of the package's own errors, and takes time in proportion.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from grpo_rl.errors import GrpoRlError

MS_PER_KIB = 50.0
"""Most processor time for each KiB that is read, one KiB at least; what is measured once may be another process's."""
TRIES = 3
BASE_MS: dict[str, float] = {"overrides": 400.0}
"""Milliseconds that a whole configuration takes, whatever the words are."""


def answers(data: bytes, folder: Path) -> None:
    from grpo_rl.rewards.rules import answers as module

    text = data.decode("utf-8", "surrogateescape")
    for find in (module.final_answer, module.after_thought, module.last_pair, module.last_tagged, module.after_phrase):
        found = find(text)
        # Only the phrase is looked for in another spelling; what is found stands in the text as it is.
        assert found is None or found in text


def boxed(data: bytes, folder: Path) -> None:
    from grpo_rl.rewards.rules.answers import last_boxed

    text = data.decode("utf-8", "surrogateescape")
    found = last_boxed(text)
    assert found is None or found in text
    if found is not None and not set(found) & set("{}\\"):
        assert last_boxed(f"so \\boxed{{{found}}} it is") == found


def jsonl(data: bytes, folder: Path) -> None:
    from grpo_rl.config.schema.tree import DataConfig
    from grpo_rl.data.rows import example
    from grpo_rl.data.sources.jsonl import open_json

    # The first byte chooses the kind of file.
    path = folder / ("rows.jsonl", "rows.json")[data[0] % 2 if data else 0]
    path.write_bytes(data[1:])
    with contextlib.suppress(GrpoRlError):
        rows = open_json(path.name, path)
        for number in range(len(rows)):
            with contextlib.suppress(GrpoRlError):
                json.dumps(example(rows.row(number), rows.where(number), DataConfig()).prompt)


def overrides(data: bytes, folder: Path) -> None:
    from grpo_rl.config.compose import compose

    words = data.decode("utf-8", "surrogateescape").split("\0")[:20]
    with contextlib.suppress(GrpoRlError):
        # What is accepted can be given again, and means the same.
        first = compose(words)
        recipe = folder / "again.yaml"
        recipe.write_text(first.yaml(), encoding="utf-8")
        assert compose([f"recipe={recipe}"]).resolved == first.resolved


def manifest(data: bytes, folder: Path) -> None:
    from grpo_rl.checkpoint.manifest import MANIFEST, _seal, verify

    checkpoint = folder / "step_3"
    checkpoint.mkdir(exist_ok=True)
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        # A seal that fits, so that what is behind it is reached, too.
        content = json.loads(data)
        content.pop("sha256", None)
        data = json.dumps(content | {"sha256": _seal(content)}).encode()
    (checkpoint / MANIFEST).write_bytes(data)
    try:
        found = verify(checkpoint)
    except GrpoRlError:
        return
    assert found.step == 3 and json.loads(data)["files"] == {}, "only files that are there"


@cache
def _tokenizer() -> Any:
    from grpo_rl.models.builtin import build_tokenizer, get_builtin

    return build_tokenizer(get_builtin("builtin:arithmetic").vocab_size)


def template(data: bytes, folder: Path) -> None:
    from grpo_rl.config.schema.tree import DataConfig
    from grpo_rl.data.prompts import Renderer
    from grpo_rl.data.rows import example
    from grpo_rl.data.sources.jsonl import parse_row

    # A template or none, and a row.
    given, _, line = data.rpartition(b"\n")
    with contextlib.suppress(GrpoRlError):
        own = given.decode("utf-8", "replace") if b"{{" in given or b"{%" in given else None
        renderer = Renderer(DataConfig(chat_template=own), _tokenizer())
        row = example(parse_row(line, "line 1"), "line 1", DataConfig())
        text = renderer.render(row.prompt, "line 1")
        if own is None:
            renderer.tokenize([row.prompt], [text])


ROW = {"data_source": "d", "prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}}
SEEDS: dict[str, list[bytes]] = {
    "answers": [
        b"<think>1 + 1</think> <answer>2</answer>",
        b"so the answer is $2$. Or not",
        b"Final answer: \\(2\\)\n#### 1,000",
        "answer is \u0130 \uff14\uff12 \u0664\u0662 \u200d".encode(),
        b"<think>" * 50 + b"</think>" * 49,
        b"\x1b[31m\x00\xff<answer><answer></answer>",
    ],
    "boxed": [
        b"\\boxed{\\frac{1}{2}}",
        b"\\boxed 7$",
        b"\\fbox{\\{1\\}} and \\boxed{",
        b"\\boxed" + b"{" * 200 + b"}" * 200,
        b"\\boxed{a}\\boxed{b\\}}",
    ],
    "jsonl": [
        b"\0" + json.dumps(ROW).encode() + b"\n",
        b"\1[" + json.dumps(ROW).encode() + b"]",
        b"\2\x1f\x8b\x08\x00",
        b'\0{"a": NaN, "a": 1e999, "b": ' + b"9" * 5000 + b"}\n\n[1]\n",
        b"\0" + b"[" * 5000,
        b"\0\xef\xbb\xbf{}\n",
        b'\0{"prompt": "\\ud800", "data_source": 1}\n',
    ],
    "overrides": [
        b"trainer.total_training_steps=3\0actor_rollout_ref.actor.optim.lr=1e-6",
        b"reward.functions=[auto,0.2*format]\0~trainer.logger",
        b"++a.b=1\0x=${oc.env:HOME}\0y=${y}\0recipe=../../x",
        "actor_rollout_ref.actor.\u0441lip_ratio=0.2\0data.train_files=task:arithmetic".encode(),
        b"trainer.seed=010\0trainer.experiment_name=../../x\0data.system_prompt='{a: !!python/object:b {}}'",
        b"algorithm.gamma=.inf\0algorithm.lam=1_000\0trainer.save_freq=no\0a=1,2",
    ],
    "manifest": [
        b'{"format": 1, "step": 3, "files": {}}',
        b'{"format": 1, "step": 3, "files": {"../../x": [1, "00"]}}',
        b'{"format": 1, "step": -1, "files": {"/etc/passwd": [1, "00"], "a\\u0000b": [1, "x"]}}',
        b'{"format": 1, "step": 1e999, "files": {".": [0, ""], "step_3": null}}',
        b"[" * 3000,
    ],
    "template": [
        b"\n" + json.dumps(ROW).encode(),
        b"{% for m in messages %}{{ m['content'] }}{% endfor %}\n" + json.dumps(ROW).encode(),
        b"{{ messages[9].x.y }}\n" + json.dumps(ROW).encode(),
        b"{{ ''.__class__.__mro__ }}{% include 'x' %}\n" + json.dumps(ROW).encode(),
        b"{{ raise_exception('no') }}\n" + json.dumps(ROW | {"prompt": "{{ 7 * 7 }} <|end|>"}).encode(),
    ],
}
TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "answers": answers,
    "boxed": boxed,
    "jsonl": jsonl,
    "overrides": overrides,
    "manifest": manifest,
    "template": template,
}


def check(name: str, data: bytes, folder: Path) -> None:
    """One input. Raises what the target raises, and AssertionError when it takes too long every time."""
    allowed_ms = BASE_MS.get(name, 0.0) + MS_PER_KIB * max(1.0, len(data) / 1024)
    taken_ms = []
    for _ in range(TRIES):
        began = time.process_time()
        TARGETS[name](data, folder)
        taken_ms.append(1000 * (time.process_time() - began))
        if taken_ms[-1] <= allowed_ms:
            return
    raise AssertionError(f"{name}: {min(taken_ms):.0f} ms for {len(data)} bytes; allowed are {allowed_ms:.0f}")


def seeds() -> Iterator[tuple[str, bytes]]:
    """Every seed, with its target's name."""
    for name, some in SEEDS.items():
        for seed in some:
            yield name, seed
