"""What a notebook shows of an answer: one line with the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import shardwise as sw

MODEL, CLUSTER = sw.Model.load("gpt2"), sw.Cluster.parse("2xh100-sxm-80gb")
PLAN, JOB = sw.Plan(dp=0), sw.Training(seq_len=1024, global_batch=8)
SERVED = sw.Serving(batch=2, input_tokens=64, output_tokens=8)


def test_answers_show_their_verdict_in_one_line() -> None:
    """An answer at a prompt is a line, not the whole of its model and its tables."""
    trained, served = sw.train(MODEL, CLUSTER, PLAN, JOB), sw.infer(MODEL, CLUSTER, sw.Plan(dp=0), SERVED)
    assert repr(trained).startswith("<TrainReport gpt2 on 2 x h100-sxm-80gb: fits, ")
    assert repr(served).startswith("<InferReport gpt2 on 2 x h100-sxm-80gb: fits, ")
    found = [sw.plan_training(MODEL, CLUSTER, JOB), sw.plan_serving(MODEL, CLUSTER, SERVED)]
    lines = [repr(trained), repr(served), *map(repr, found)]
    assert all(len(line) < 200 and "\n" not in line for line in lines)
    assert all("Report gpt2" in line for line in lines)


def test_counts_messages_and_rooflines_show_in_one_line() -> None:
    """What opens one answer is a line too, with what it is about."""
    trained = sw.train(MODEL, CLUSTER, PLAN, JOB)
    assert repr(sw.count(MODEL)) == "<CountReport gpt2: 124,439,808 parameters>"
    assert "46,702,792,704 parameters, 12,879,925,248 active" in repr(sw.count(sw.load_model("mixtral-8x7b")))
    assert repr(sw.comm(MODEL, CLUSTER, PLAN, JOB)).startswith(
        "<CommReport gpt2 on 2 x h100-sxm-80gb: messages a step: dp"
    )
    assert repr(sw.comm(MODEL, sw.Cluster.parse("1xh100"), PLAN, JOB)).endswith("no messages>")
    assert repr(sw.roofline(trained)).endswith(f" operators: {trained}>")


def test_what_is_asked_of_shows_in_one_line() -> None:
    """A model, a cluster and a device at a prompt are a line each, not their layers and sources."""
    assert repr(sw.load_model("llama-3.1-8b")) == "<Model llama-3.1-8b: 32 layers of 4096, vocabulary of 128256>"
    assert repr(CLUSTER) == "<Cluster of 2 x h100-sxm-80gb, 2 a node>"
    assert repr(CLUSTER.device).startswith("<Device h100-sxm-80gb: ")


class Page(HTMLParser):
    """Reads HTML and keeps what is open, the tags and the text."""

    def __init__(self, text: str) -> None:
        """Read a whole text."""
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count a tag, which is open from here on and names nothing outside."""
        assert not {"src", "href"} & dict(attrs).keys(), "nothing is fetched"
        self.open.append(tag)
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        """Close the tag that was opened last."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep a piece of text as a line."""
        self.text += data + "\n"


HOSTILE = "<script>alert('&')</script>"
NAMED = replace(MODEL, name=HOSTILE)
LOAD = sw.Workload(
    input_tokens=sw.Length(mean=64), output_tokens=sw.Length(mean=8), arrivals=sw.Arrivals(rate=2.0), count=50
)
ANSWERS = {
    "model": lambda: NAMED,
    "training": lambda: sw.train(NAMED, CLUSTER, PLAN, JOB),
    "serving": lambda: sw.infer(NAMED, CLUSTER, sw.Plan(dp=0), SERVED),
    "load": lambda: sw.serve(NAMED, CLUSTER, sw.Plan(dp=0), LOAD),
    "search": lambda: sw.plan_training(NAMED, CLUSTER, JOB),
    "search of deployments": lambda: sw.plan_serving(NAMED, CLUSTER, SERVED),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_card_is_well_formed_and_escapes_names(name: str) -> None:
    """HTML of an answer closes what it opens, says its line, and holds no name as markup and nothing from elsewhere."""
    answer = ANSWERS[name]()
    page = Page(answer._repr_html_())
    assert not page.open and not page.tags["script"]
    assert HOSTILE in page.text.partition("\n")[0]
    assert page.tags["tr"] >= 1 and len(answer._repr_html_()) < 10_000


def test_a_search_shows_its_plans_and_not_the_question_again() -> None:
    """Each line says the plan in words, by which it differs from the others, and a verdict has a colour."""
    best = ANSWERS["search of deployments"]()
    page = Page(best._repr_html_())
    assert f"batch {best.best[0].job.batch}" in page.text and page.text.count(HOSTILE) == 1
    assert "color:#238636" in best._repr_html_()


def test_a_card_has_bars_and_bands() -> None:
    """A training shows what fills the memory as bars, and its headlines with the interval of published runs."""
    report = sw.train(MODEL, CLUSTER, PLAN, JOB)
    page = Page(report._repr_html_())
    assert page.tags["div"] >= 4 and "optimizer" in page.text
    assert page.text.count(" to ") == sum(hasattr(report, name) for name in report.interval) >= 5
    load = Page(ANSWERS["load"]()._repr_html_())
    assert load.tags["div"] == 2 and load.text.count(" to ") == 5


def test_a_plan_shows_what_it_says() -> None:
    """A plan's card has the fields that were given, and no others."""
    page = Page(sw.Plan(tp=4, dp=2, sharding="fsdp")._repr_html_())
    assert page.text.split() == ["Plan", "for", "8", "devices", "tp", "4", "dp", "2", "sharding", "fsdp"]
