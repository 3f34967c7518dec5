from __future__ import annotations

import re
from html.parser import HTMLParser
from io import StringIO

import pytest
import torch
from rich.console import Console

from kvkeep import KeepCache
from kvkeep.cli.shading import level, print_shaded
from kvkeep.errors import CacheStateError
from kvkeep.hf.shading import Stretch, kept_shares, shaded_stretches
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

from .conftest import TEXT, check_text


@pytest.fixture
def show(kvkeep, folder, context):
    def call(*words, model=folder):
        budget = ("--policy", "snapkv", "--compression-ratio", 0.75)
        return kvkeep("show", "--model", model, "--context", context, *budget, *words)

    return call


class Reader(HTMLParser):
    """The text of <main>, and every address in the page."""

    def __init__(self):
        super().__init__()
        self.inside, self.text, self.addresses, self.tags = False, "", [], set()

    def handle_starttag(self, tag, attrs):
        self.inside = self.inside or tag == "main"
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "main"

    def handle_data(self, data):
        self.text += data if self.inside else ""


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def cut(request):
    """A cut cache, and the positions that each of its cells kept."""
    model, _ = fake_model(request.param, layers=4)
    cache = KeepCache(model, "snapkv+ada", compression_ratio=0.6)
    ids = torch.randint(3, 200, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE_ARGUMENT: cache})
    return cache, {
        (keep.index, head): set(cache.kept_positions(keep.index, head=head).tolist())
        for keep in cache.keep_layers
        for head in range(2)
    }


def test_a_share_counts_the_cells_that_hold_a_position(cut):
    cache, kept = cut
    expected = [sum(p in positions for positions in kept.values()) / len(kept) for p in range(50)]
    assert kept_shares(cache).tolist() == pytest.approx(expected)


def test_layers_are_the_models_own(cut):
    cache, kept = cut
    for layer, head in kept:
        assert set(kept_shares(cache, layer, head).nonzero().flatten().tolist()) == kept[layer, head]
        both = kept_shares(cache, layer)
        assert both.tolist() == [sum(p in kept[layer, h] for h in range(2)) / 2 for p in range(50)]
    with pytest.raises(CacheStateError, match="an evictable layer"):
        kept_shares(cache, 4)
    with pytest.raises(CacheStateError, match="a KV head from 0 to 1"):
        kept_shares(cache, None, 2)
    if cache.sliding_layers:
        with pytest.raises(CacheStateError, match="their own window"):
            kept_shares(cache, 0)


def test_stretches_are_the_text_and_follow_its_tokens():
    _, tokenizer = fake_model()
    text = "né ☕!"
    shares = [0.0, 1.0, 0.9, 0.0, 0.25, 0.9, 0.9, 0.5]  # of bytes: é is two of them, the cup three
    stretches = shaded_stretches(text, tokenizer, shares)
    assert "".join(stretch.text for stretch in stretches) == text
    expected = [("n", 0.0), ("é", 1.0), (" ", 0.0), ("☕", 0.25), ("!", 0.5)]
    assert stretches == [Stretch(*pair) for pair in expected]
    with pytest.raises(CacheStateError, match="tokens"):
        shaded_stretches(text, tokenizer, [0.0])


def test_shades_rise_with_the_share():
    assert [level(share) for share in (0, 0.01, 0.25, 0.26, 0.5, 0.75, 0.76, 1)] == [0, 1, 1, 2, 2, 3, 4, 4]


def test_a_pipe_gets_dots_and_no_codes(show):
    ran = show()
    check_text(ran)
    body = ran.out.split("\n\n", 1)[1]
    assert "·" in body
    assert re.search(rf"text +{len(TEXT.encode())} tokens", ran.out)


def test_one_cell_shows_exactly_what_it_kept(show, folder):
    ran = show("--layer", 1, "--head", 0)
    check_text(ran)
    shown = ran.out.split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
    letters = [letter for letter in shown if not letter.isspace()]
    kept = sum(letter != "·" for letter in letters)
    assert "layer 1, KV head 0" in ran.out
    assert 0 < kept < len(letters) * 0.4


def test_shades_stand_where_the_tokens_are(kvkeep, folder, context):
    words = ("--context", context, "--policy", "streaming-llm[sinks=4]", "--entries", 24)
    ran = kvkeep("show", "--model", folder, *words)  # the sinks are in the template's header, 20 tokens in the text
    shown = ran.out.split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
    kept = TEXT[-20:].split()
    assert "".join(shown.split()).replace("·", "") == "".join(kept)


def test_a_terminal_gets_shades_that_fit():
    file = StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="truecolor", markup=False, emoji=False)
    stretches = [Stretch("word " * 30, 0.9), Stretch(":smile: [red]x[/red]\n", 0.0), Stretch("and on " * 20, 0.3)]
    print_shaded(console, stretches, {"policy": "snapkv"})
    written = file.getvalue()
    assert "\x1b[" in written
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert ":smile: [red]x[/red]" in " ".join(plain.split())
    assert max(map(len, plain.splitlines())) <= 80


def test_html_is_one_file_with_the_text_escaped(show, tmp_path):
    file = tmp_path / "kept.html"
    ran = show("--html", file, "--question", "<script>alert(1)</script>")
    assert (ran.status, ran.out) == (0, "")
    html = file.read_text(encoding="utf-8")
    page = Reader()
    page.feed(html)
    assert page.text == TEXT
    assert page.addresses == []
    assert "script" not in page.tags
    assert "&lt;script&gt;" in html
    assert "prefers-color-scheme: dark" in html
    assert "--k:" in html


def test_errors(show, gemma_folder, tmp_path):
    assert "evictable layer: 1, 3" in " ".join(show("--layer", 0, model=gemma_folder).err.split())
    assert show("--html", tmp_path / "no" / "file.html").status == 2
