"""Some devices of an instance, or of the cluster of a file: asked for, and what searches find on them asked again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from command_line import run


@pytest.mark.parametrize(
    ("words", "on"),
    [
        (("train", "--seq-len", "2048", "--global-batch", "48", "--on", "2xp5.48xlarge"), "--on 2xp5.48xlarge"),
        (
            ("train", "--seq-len", "2048", "--global-batch", "48", "--on", "p5.48xlarge", "--at-most", "12"),
            "--on 2xp5.48xlarge --num-devices 12",
        ),
        (("train", "--seq-len", "2048", "--global-batch", "4", "--on", "H100:2", "--tp", "2"), "--on H100:2"),
        (("infer", "--on", "p5.48xlarge", "--engine", "vllm"), "--on p5.48xlarge"),
        (
            ("infer", "--on", "own.toml", "--at-most", "2", "--tp", "2", "--engine", "vllm"),
            "--on own.toml --num-devices 2",
        ),
        (("serve", "--on", "own.toml", "--rate", "1"), "--on own.toml --rate 1 --num-devices 1"),
        (("serve", "--on", "H100:2", "--rate", "1"), "--on 1xH100"),
    ],
)
def test_the_command_of_a_part_of_an_instance_or_of_a_file_asks_again(
    words: tuple[str, ...], on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a search finds on instances, or on some devices of a file's cluster, is asked again on as many devices."""
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text('device = "h100-sxm-80gb"\nnum_devices = 4\n')
    done = run("plan", words[0], "llama-3.2-1b", *words[1:])
    again = " ".join(done.out[done.out.index("AGAIN") + 5 :].replace("\\\n", " ").split())
    assert done.status == 0 and f"{on} " in again
    assert run(*shlex.split(again)[1:]).status == 0


def test_part_of_the_devices_that_are_named() -> None:
    """Four devices of an instance keep its price, and more than there are is refused."""
    asked = ("train", "llama-3.2-1b", "--seq-len", "2048", "--global-batch", "8", "--json", "--on", "p5.48xlarge")
    whole, part = (run(*asked, *more).tree for more in ((), ("--num-devices", "4")))
    assert (part["cluster"]["num_devices"], part["plan"]["dp"]) == (4, 4)
    assert part["cluster"]["usd_per_device_hour"] == whole["cluster"]["usd_per_device_hour"]
    many = run(*asked, "--num-devices", "16")
    assert many.status == 2 and "is more than the 8 devices of p5.48xlarge" in many.out
