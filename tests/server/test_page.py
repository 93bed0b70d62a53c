"""The page at "/" in a headless browser: the engine's state, and a chat with thinking and tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moet.config import ServerConfig
from moet.types import Request
from tests.scripted import ScriptedCore
from tests.server.serving import MODEL, listening, scripted_engine
from tests.texts import EOS, byte_tokenizer, ids

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CALL = (
    "it wants a sum</think>I will add.\n\n<|DSML|tool_calls>\n"
    '<|DSML|invoke name="calculate">\n'
    '<|DSML|parameter name="a" string="false">19</|DSML|parameter>\n'
    '<|DSML|parameter name="operation" string="true">add</|DSML|parameter>\n'
    '<|DSML|parameter name="b" string="false">23</|DSML|parameter>\n'
    "</|DSML|invoke>\n</|DSML|tool_calls>"
).replace("|", "\uff5c")
CLOSE = "now I know</think>It is <b>42</b>."


def script(request: Request) -> list[int]:
    """Calls a tool if there is one and its result is not there yet; says the sum otherwise."""
    text = byte_tokenizer().decode(request.prompt_token_ids)
    called = "42" in text.rpartition("add up")[2]
    return [*ids(CLOSE if called or "calculate" not in text else CALL), EOS]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("there is no chromium with its driver here")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument("--window-size=1400,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    made = webdriver.Chrome(options=options, service=service)
    yield made
    made.quit()


class Seen:
    """The page as a browser has it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        self.find: Callable[[str], list[Any]] = lambda css: browser.find_elements(
            "css selector", css
        )
        browser.get(url + "/")

    def wait(self, holds: Callable[[], object]) -> None:
        """Until something holds."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.browser, 20, poll_frequency=0.1).until(lambda _: holds())

    def texts(self, css: str) -> list[str]:
        return [each.text for each in self.find(css)]

    def ask(self, text: str) -> None:
        [field], [button] = self.find("#text"), self.find("#send")
        field.send_keys(text)
        button.click()

    def errors(self) -> list[str]:
        """What the browser complained about."""
        return [e["message"] for e in self.browser.get_log("browser") if e["level"] == "SEVERE"]

    def keep(self, name: str) -> None:
        """Save a picture, if MOET_TEST_SCREENSHOTS names a folder for them."""
        folder = os.environ.get("MOET_TEST_SCREENSHOTS")
        if folder:
            self.browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def test_the_page_shows_the_engine_and_talks_with_tools(browser: Any) -> None:
    core = ScriptedCore(script)
    with listening(scripted_engine(core)) as (url, _):
        page = Seen(browser, url)
        page.wait(lambda: page.texts("#state") == ["ready"])
        assert MODEL in page.texts("#model")[0]
        names = page.texts(".tile .name")
        assert {"generated", "waiting", "KV pages", "prefix hits", "drafts accepted"} <= set(names)
        page.wait(lambda: "2 layers, 6 of 8 experts resident" in page.texts("#experts-note"))

        page.find("#tools")[0].click()
        page.ask("add up 19 and 23")
        page.wait(lambda: len(page.texts(".turn.assistant .note")) == 2)
        assert page.texts(".turn.assistant .reasoning pre") == ["it wants a sum", "now I know"]
        assert page.texts(".turn.assistant .content") == ["I will add.", "It is <b>42</b>."]
        [arguments] = page.texts(".turn.assistant .call pre")
        assert arguments.replace(" ", "") == '{"a":19,"operation":"add","b":23}'
        assert page.texts(".turn.tool pre") == ["42"]
        assert "tok/s" in page.texts(".turn.assistant .note")[1]
        page.keep("page")
        assert page.errors() == []
        # What was thought and called goes back with the next question
        last = byte_tokenizer().decode(core.submitted[-1].prompt_token_ids)
        assert "it wants a sum" in last

        page.find("#clear")[0].click()
        assert page.find(".turn") == []


def test_the_page_asks_for_a_key_and_stops_what_it_began(browser: Any) -> None:
    core = ScriptedCore(lambda request: ids("word " * 700), step_s=0.005)
    with listening(scripted_engine(core), ServerConfig(api_keys=("k1",))) as (url, _):
        page = Seen(browser, url)
        page.wait(lambda: page.find("#key-form")[0].is_displayed())
        page.find("#key")[0].send_keys("k1")
        page.find("#key-form button")[0].click()
        page.wait(lambda: page.texts("#state") == ["ready"])
        assert not page.find("#key-form")[0].is_displayed()
        page.find("#limit")[0].clear()
        page.find("#limit")[0].send_keys("3000")
        page.ask("go on")
        page.wait(lambda: page.texts(".turn.assistant pre"))
        page.find("#stop")[0].click()
        page.wait(lambda: page.texts("#log > .note") == ["stopped"])
        page.wait(lambda: not core.open)
        assert len(core.aborted) == 1
