"""What entries bring: taken out one by one, by source, and beyond the source that suggested them."""

from __future__ import annotations

from pathlib import Path

from accuracy.gains import FACT, FITTED, Gain, gains, page, removals, rows, stored, uncited
from accuracy.published import Published

HEADER = "case_id,metric,value,model,device,num_gpus,seq_len,global_batch,micro_batch,sharding,framework,quality,source"
ROW = "{0}-1,step_time,{1},llama-3-8b,h100-sxm-80gb,8,4096,16,1,fsdp,torchtitan (2024-12),A,{0}"


def test_a_gain_elsewhere_leaves_out_the_source_that_suggested_the_entry() -> None:
    """The source that gains most is taken for that; an entry that one source alone has gains nothing elsewhere."""
    found = Gain(name="", runs=9, sources={"a": 0.2, "b": 0.05, "c": -0.01})
    assert found.suggested == "a" and found.elsewhere == (0.05 - 0.01) / 2
    assert Gain(name="", runs=1, sources={"a": 0.2}).elsewhere is None


def test_every_entry_of_this_folder_is_taken_out() -> None:
    """What sources document, frameworks, variants and adjustments are each left out of one context."""
    names = [one.name for one in removals()]
    assert sum(name.startswith("documented: ") for name in names) == len(Published.documented)
    assert {"framework", "variant", "adjustment", "stack"} <= {name.split()[0] for name in names}


def test_rows_without_an_entry_are_predicted_anew(tmp_path: Path) -> None:
    """Without the entry of its release a row runs on another stack: two sources gain what they are nearer by."""
    file = tmp_path / "training.csv"
    file.write_text("\n".join((HEADER, ROW.format("one", 9.0), ROW.format("two", 9.5))) + "\n")
    chosen = [one for one in removals() if "fsdp2-2024" in one.name and one.name.startswith("framework")][:1]
    (found,) = gains([str(file)], chosen)
    assert found.runs == 2 and set(found.sources) == {"one", "two"} and found.elsewhere is not None


def test_a_configuration_gains_by_its_speed_whatever_memory_it_states_first(tmp_path: Path) -> None:
    """Rows of memory, which no launch moves, stand before those of speed, which it does."""
    said = ",qwen2.5-0.5b,l40s,1,128,1,1,none,transformers,A,one"
    file = tmp_path / "training.csv"
    file.write_text("\n".join((HEADER, f"a-1,memory_p99,2e10{said}", f"a-1,step_time,0.01{said}")) + "\n")
    (found,) = gains([str(file)], [one for one in removals() if one.name == "number eager_launch_seconds"])
    assert (found.runs, found.sources.keys()) == (1, {"one"})


# Numbers that move rows by less decide nothing.
LEAST = 0.001


def test_nothing_stands_without_a_citation_or_a_gain_elsewhere() -> None:
    """Facts name the file, page or log that says so; fitted numbers gain on sources that did not suggest them."""
    assert [*uncited()] == []
    numbers = {row["entry"]: row for row in stored() if row["rests_on"] == FITTED}
    assert set(numbers) == {one.name for one in removals() if one.basis == FITTED}
    for name, row in numbers.items():
        assert row["runs"] == "0" or float(row["elsewhere"]) > -LEAST, name


def test_the_stored_gains_are_those_of_entries_that_there_are() -> None:
    """Every row of the stored table is of an entry, and says what that rests on."""
    known = {one.name: one.basis for one in removals()}
    assert {row["entry"]: row["rests_on"] for row in stored()}.items() <= known.items()


def test_a_fitted_number_names_the_source_that_suggested_it() -> None:
    """What another source gains is a gain elsewhere though it gains most."""
    found = Gain(name="number x", runs=4, sources={"a": 0.2, "b": 0.1}, basis=FITTED, named="b")
    (row,) = rows([found])
    assert (found.elsewhere, row["source"], row["others"]) == (0.2, "b", "1")
    assert "| `number x` | fitted | 4 | b | +10.0% | +20.0% of 1 |" in page([row])
    assert next(iter(rows([Gain(name="y", runs=0, sources={})])))["rests_on"] == FACT
