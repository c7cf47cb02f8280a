"""The table as shown: the page in a real browser, the terminal, Markdown, the command line."""

import json
import re

import pytest

import nhwc
from nhwc._ops import Operator, OperatorTable, Outcome, Speed, Tally
from nhwc.cli import main
from nhwc.render.ops_html import ops_html
from nhwc.render.ops_markdown import ops_markdown
from nhwc.render.ops_text import ops_text

from ..browser import needs_browser, opened


def operator(name, outcome, *, group="tensor", backward=None, slow=False, example="", variant=""):
    rows = [
        Tally(4, dtype, "forward", outcome, 1, 3, example if outcome is not Outcome.KEEPS else "")
        for dtype in ("float32", "uint8")
    ]
    if backward:
        rows.append(Tally(4, "float32", "backward", backward, 1, 1, "behind <b>"))
        rows.append(Tally(5, "float32", "forward", Outcome.CONVERTS, 1, 1, "volume"))
    speed = Speed("case", "4x64x56x56", "float32", 1e-3, 2e-3, 0.5, (0.45, 0.55))
    return Operator(name, variant, group, tuple(rows), (speed,) if slow else ())


@pytest.fixture(scope="module")
def table():
    return example_table()


def example_table():
    many = [operator(f"op{i}", Outcome.KEEPS, group="pointwise") for i in range(6)]
    return OperatorTable(
        nhwc.Environment.here().to_dict(),
        "cpu",
        ("float32", "uint8"),
        (
            operator("softmax", Outcome.LOSES, slow=True, example="aten::_softmax returns | it"),
            operator("pad", Outcome.SOMETIMES, backward=Outcome.KEEPS, variant="circular"),
            operator("tril", Outcome.KEEPS, backward=Outcome.WRONG),
            *many,
            Operator("odd", "", "tensor", (), (), "float32: RuntimeError: broken"),
        ),
        {"mv": "no 4-D input", "dot": "no 4-D input"},
        ("a note",),
        12.3,
    )


def test_text_lists_the_worst_first(table):
    text = ops_text(table)
    assert text.index("sometimes loses: 1") > text.index("loses: 1")
    assert "    softmax\n" in text
    assert "softmax 2.0x (case)" in text
    assert "odd: float32: RuntimeError: broken" in text
    assert "2 operators left out" in text
    assert "\033" not in text
    assert "\033[31;1m" in ops_text(table, color=True)


def test_text_of_few_operators_gives_the_reason(table):
    few = OperatorTable(table.environment, "cpu", table.dtypes, table.operators[:2])
    text = ops_text(few)
    assert "pad (circular)  sometimes loses" in text
    assert "aten::_softmax returns | it" in text
    assert "1/3 calls  float32 uint8" in text
    assert "0.50x  slower in NHWC" in text
    none = OperatorTable(table.environment, "cpu", table.dtypes, (), table.left_out)
    assert "mv  not checked: no 4-D input" in ops_text(none)


def test_markdown_has_every_operator_and_escapes(table):
    text = ops_markdown(table)
    for op in table.operators:
        assert f"| `{op.title}` |" in text
    assert "returns \\| it" in text
    assert "**0.50**" in text
    assert "- no 4-D input: `mv`, `dot`" in text
    heads = re.findall(r"^\| operator .*$", text, re.M)
    rows = re.findall(r"^\| `softmax`.*$", text, re.M)
    assert heads[0].count("|") == rows[0].count("|")


def test_the_page_loads_nothing_from_outside(table):
    text = ops_html(table)
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"']*""", text) == []
    assert re.findall(r"url\(|@import|fetch\(|XMLHttpRequest", text) == []
    assert "{{" not in text


def browser_page(table, tmp_path):
    path = tmp_path / "ops.html"
    path.write_text(ops_html(table))
    return path


@needs_browser[0]
@needs_browser[1]
def test_the_page_answers(table, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    with opened(browser_page(table, tmp_path)) as browser:

        def all_of(selector):
            return browser.find_elements(By.CSS_SELECTOR, selector)

        def names():
            return [cell.text for cell in all_of("tr.op td.name")]

        assert names()[:2] == ["odd", "op0"]
        assert all_of("#chips button")[0].text.split("\n") == ["1", "loses"]
        all_of("[data-sort=forward]")[0].click()
        assert names()[:2] == ["softmax", "pad circular"]
        all_of("[data-sort=forward]")[0].click()
        assert names()[-1] == "softmax"

        all_of("#chips [data-outcome=loses]")[0].click()
        assert names() == ["softmax"]
        all_of("tr.op")[0].click()
        assert "aten::_softmax returns | it" in all_of("tr.detail")[0].text
        all_of("#chips [data-outcome=loses]")[0].click()

        all_of("#search")[0].send_keys("behind <b>")
        assert names() == ["tril", "pad circular"] or names() == ["pad circular", "tril"]
        all_of("#search")[0].clear()
        all_of("#search")[0].send_keys("nothing at all")
        assert names() == []
        all_of("#reset")[0].click()
        assert len(names()) == len(table.operators)

        all_of("#slower")[0].click()
        assert names() == ["softmax"]
        all_of("#slower")[0].click()
        Select(all_of("#group")[0]).select_by_value("pointwise")
        assert len(names()) == 6
        Select(all_of("#group")[0]).select_by_value("")
        all_of("#dims button")[1].click()
        assert set(names()) == {"odd", "pad circular", "tril"}
        all_of("#dims button")[0].click()
        Select(all_of("#dtype")[0]).select_by_value("uint8")
        assert "wrong values" not in browser.find_element(By.ID, "table").text
        assert "2 operators left out" in all_of("#left summary")[0].text

        theme = browser.execute_script("return document.documentElement.dataset.theme")
        all_of("#theme")[0].click()
        other = browser.execute_script("return document.documentElement.dataset.theme")
        assert {theme, other} == {"light", "dark"}


# The command line.


def test_an_operator_of_ones_own(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def halve(x):\n    return x.contiguous() / 2\n")
    assert main(["ops", f"{path}:halve", "--no-timing", "--input", "2x4x6x6"]) == 0
    assert "loses" in capsys.readouterr().out
    assert main(["ops", f"{path}:halve", "--format", "json", "--no-timing"]) == 0
    assert json.loads(capsys.readouterr().out)["operators"][0]["group"] == "custom"
    assert main(["ops", f"{path}:halve", "relu"]) == 2
    assert "Name one kind" in capsys.readouterr().err


def test_several_types_of_ones_own_operator_are_one_operator(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "def halve(x):\n    return x.contiguous() / 2\n"
        "pool = nn.MaxPool2d(2)\n"
        "def fails(x):\n    assert False\n"
    )
    types = ["--dtype", "float32", "--dtype", "bfloat16", "--dtype", "float32"]
    assert (
        main(["ops", f"{path}:halve", f"{path}:pool", *types, "--no-timing", "--format", "json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["dtypes"] == ["float32", "bfloat16"]
    assert [one["name"].rpartition(":")[2] for one in found["operators"]] == ["halve", "pool"]
    assert {kind for row in found["operators"][0]["rows"] for kind in row[-1]} == {*found["dtypes"]}
    assert main(["ops", f"{path}:fails"]) == 2
    assert "fails in NCHW already: AssertionError: AssertionError" in capsys.readouterr().err


def test_ones_own_operator_may_take_whole_numbers_and_vectors(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def raw(x):\n    return torch.as_strided(x, x.shape, (144, 36, 6, 1)).clone()\n"
        "def scaled(x, scale):\n    return x * scale[:, None, None]\n"
    )
    shape = ["--no-timing", "--input", "2x4x6x6"]
    for dtype in ("uint8", "int32", "bool"):
        assert main(["ops", f"{path}:raw", "--dtype", dtype, *shape]) == 0
        assert "wrong values" in capsys.readouterr().out
    assert main(["ops", f"{path}:scaled", *shape, "--input", "4"]) == 0
    assert "keeps" in capsys.readouterr().out


def test_one_operator_and_a_file(tmp_path, capsys):
    path = tmp_path / "one.md"
    assert main(["ops", "tril", "--dtype", "uint8", "--no-timing", "-o", str(path)]) == 0
    assert "| `tril` | **loses** |" in path.read_text()


def test_two_tables_compared(table, tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(table.to_json())
    mended = (operator("softmax", Outcome.KEEPS, slow=True), *table.operators[1:])
    new.write_text(OperatorTable(table.environment, "cpu", table.dtypes, mended).to_json())
    assert main(["ops", "--diff", str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "softmax forward 4-D float32: loses -> keeps" in out
    assert "2 changes" in out
    assert main(["ops", "--diff", str(old), str(old), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "changes": []}
    assert main(["ops", "--diff", str(old), str(tmp_path / "none.json")]) == 2
    assert main(["ops", "--diff", str(old), str(old), "--format", "html"]) == 2


def test_rules_on_the_command_line(monkeypatch, tmp_path, capsys):
    from nhwc._ops import rules

    few = [rules.Section("some", rules.SECTIONS[0].rules[:2])]
    monkeypatch.setattr(rules, "SECTIONS", few)
    assert main(["ops", "--rules", "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert "| rule | expected | measured | |" in out
    assert "2 of 2 rules hold, 0 do not" in out

    page = tmp_path / "rules.html"
    assert main(["ops", "--rules", "-o", str(page)]) == 0
    assert "http" not in re.sub(r'id="data">.*?</script>', "", page.read_text(), flags=re.DOTALL)
    assert main(["ops", "--rules", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rules"][1]["program"].startswith("x = torch.rand(10, 3, 32, 32)\ny = x.to(")
    assert [tensor["name"] for tensor in data["rules"][1]["drawn"]] == ["x", "y"]
    assert data["rules"][1]["drawn"][1]["memory"]["strides"] == [3072, 1, 96, 3]

    elsewhere = rules.Rule("some processors", "yes", "'no'", elsewhere="no")
    few.append(rules.Section("more", (rules.Rule("never", True, "False"), elsewhere)))
    assert main(["ops", "--rules"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"more\nFAIL  never +False, not True\n", out)
    assert re.search(r"pass  some processors +no; on other machines yes\n", out)


@needs_browser[0]
@needs_browser[1]
def test_the_page_of_rules_finds_a_number_everywhere(tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    from nhwc._ops import check_rules
    from nhwc._ops.rules import SECTIONS
    from nhwc.render.ops_rules_html import rules_html

    path = tmp_path / "rules.html"
    found = check_rules(sections=SECTIONS[:3:2])
    path.write_text(rules_html(found, nhwc.Environment.here()))
    with opened(path) as browser:
        cards = browser.find_elements(By.CSS_SELECTOR, ".rule")
        assert len(cards) == len(found)
        _, y = cards[1].find_elements(By.CSS_SELECTOR, ".drawn")
        assert "y is the numbers of x, copied in another order" in y.text
        grid = y.find_elements(By.CSS_SELECTOR, ".m-panel .m-cell")
        strip = y.find_elements(By.CSS_SELECTOR, ".m-strip .m-cell")
        assert [cell.text for cell in grid] == [str(number) for number in range(36)]
        assert [cell.text for cell in strip[:5]] == ["0", "12", "24", "1", "13"]
        colors = [cell.value_of_css_property("background-color") for cell in (grid[12], strip[1])]
        assert colors[0] == colors[1]

        ActionChains(browser).move_to_element(strip[1]).perform()
        lit = browser.find_elements(By.CSS_SELECTOR, ".m-lit")
        assert {cell.text for cell in lit} == {"12"}
        assert len(lit) == 4

        browser.find_element(By.ID, "search").send_keys("expand")
        visible = [card for card in cards if card.is_displayed()]
        assert [card.find_element(By.TAG_NAME, "h3").text for card in visible] == [
            "expanded numbers share their place"
        ]
        [place] = visible[0].find_elements(By.CSS_SELECTOR, ".drawn:last-child [data-n*='0 1 ']")
        ActionChains(browser).move_to_element(place).perform()
        assert len(browser.find_elements(By.CSS_SELECTOR, ".m-lit")) == 9
        browser.find_element(By.ID, "search").send_keys("no such")
        assert browser.find_element(By.ID, "empty").is_displayed()
        browser.find_element(By.ID, "reset").click()
        assert all(card.is_displayed() for card in cards)
