import json

import pytest

from grpo_rl import __main__ as commands

ROWS = [
    {"uid": "a", "reward": 1.0, "parts": {"auto": 1.0, "format": 0.0}, "advantage": 0.5, "response": "fine"},
    {
        "uid": "b",
        "reward": 0.2,
        "parts": {"auto": 0.0, "format": 1.0},
        "advantage": -0.5,
        "response": "\x1b[2J[red]x[/red]\r\u202eevil",
    },
    {
        "uid": "c",
        "reward": 0.0,
        "parts": {},
        "advantage": None,
        "response": "<script>alert(1)</script>",
        "failure": "reward_timeout",
        "failure_cause": "took longer than reward.timeout_s=1",
    },
    {"uid": "d", "reward": "NaN", "parts": {"auto": 0.5, "format": 0.0}, "advantage": 0.0, "response": "first\nsecond"},
]


def main(words):
    return commands.main(["browse", *words])


def record(row):
    base = {
        "prompt": f"question {row['uid']}",
        "ground_truth": "8",
        "data_source": "sums",
        "sample": 0,
        "finish_reason": "stop",
    }
    base |= {"uid": row["uid"], "reward": row["reward"], "reward_parts": row["parts"], "response": row["response"]}
    base |= {"advantage": row["advantage"], "response_length": len(row["response"])}
    return base | {key: row[key] for key in ("failure", "failure_cause") if key in row}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    for step in (1, 2):
        lines = [json.dumps(record(row)) for row in ROWS[: 2 * step]]
        (folder / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n")
    return folder.parent


def uids(capsys, *words):
    assert main([*map(str, words)]) == 0
    output = capsys.readouterr().out
    return [line.split("uid=")[1].split()[0] for line in output.splitlines() if "uid=" in line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "abcd"),
        (["--where", "reward<0.5"], "bc"),
        (["--where", "format==0"], "ad"),
        (["--where", "format==1", "--where", "reward < 0.5"], "b"),
        (["--where", "failure==reward_timeout"], "c"),
        (["--where", "failure==none"], "abd"),
        (["--where", "failure!=none"], "c"),
        (["--where", "cause~took longer"], "c"),
        (["--where", "response~script"], "c"),
        (["--where", "advantage>=0"], "ad"),
        (["--where", "uid!=a"], "bcd"),
        (["--sort", "reward"], "cbad"),
        (["--sort=-reward"], "abcd"),
        (["--sort=-uid", "--limit", "2"], "dc"),
        (["--step", "1"], "ab"),
        (["--where", "reward>5"], ""),
    ],
)
def test_rollouts_are_chosen_sorted_and_counted(run, capsys, words, expected):
    assert uids(capsys, run, *words) == list(expected)


def test_what_a_model_wrote_cannot_drive_the_terminal(run, capsys):
    main([str(run), "--where", "uid==b"])
    output = capsys.readouterr().out
    assert "\\x1b[2J[red]x[/red]\\r\\u202eevil" in output
    assert not set("\x1b\r\u202e") & set(output)
    assert "auto=0" in output and "advantage=-0.5" in output and "question b" in output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--where", "rewards<1"], 2, "no rollout has 'rewards'. Did you mean reward"),
        (["--where", "formt==0"], 2, "Did you mean format"),
        (["--sort", "rewrd"], 2, "Did you mean reward"),
        (["--where", "reward"], 2, "write NAME, a comparison"),
        (["--where", "__import__('os')"], 2, "write NAME, a comparison"),
        (["--where", "reward<high"], 2, "'high' is not a number"),
        (["--step", "7"], 3, "there is no step 7; there are 1, 2"),
        (["--val"], 3, "no rollouts were logged"),
    ],
)
def test_wrong_words_are_refused_with_what_there_is(run, capsys, words, code, message):
    assert main([str(run), *words]) == code
    assert message in capsys.readouterr().err


def test_a_broken_file_is_told(run, capsys):
    (run / "rollouts" / "step_9.jsonl").write_text('{"reward": \n')
    assert main([str(run)]) == 3
    assert "step_9.jsonl, line 1: is no JSON object" in capsys.readouterr().err


def test_an_episode_is_shown_turn_by_turn_with_its_trained_turns_marked(run, capsys, tmp_path):
    messages = [
        {"role": "assistant", "content": "is it 5?", "tokens": 4, "reward": 0.0},
        {"role": "user", "content": "\x1b[2Jhigher"},
        {"role": "assistant", "content": "7", "tokens": 2, "reward": 1.0},
    ]
    episode = {"messages": messages, "spans": [[0, 4], [9, 2]], "ended": "done"}
    path = max((run / "rollouts").iterdir(), key=lambda file: int(file.stem.split("_")[1]))
    rows = [record(ROWS[0]) | {"episode": episode, "ended": "done", "num_turns": 2}, record(ROWS[1])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(run), "--where", "turns==2", "--where", "ended==done"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 rollouts" in shown and "turn *    is it 5?" in shown and "turn *    7" in shown
    assert "user      " in shown and "higher" in shown and "\x1b" not in shown
