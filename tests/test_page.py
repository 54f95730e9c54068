"""The web page in a real browser (headless Chromium), served by ./deeptutor-server with a tiny model, whose replies are noise; what
Markdown becomes is checked with text of our own. Where DT_SCREENSHOTS names a folder, pictures of the page are left there."""
import json
import os
import shutil
import time

import pytest

selenium = pytest.importorskip("selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.select import Select  # noqa: E402

from server_support import MAKE_MODEL, SERVER, make_tiny, serving  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
PICTURES = os.environ.get("DT_SCREENSHOTS")

pytestmark = [
    pytest.mark.skipif(not os.access(SERVER, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK), reason="DT_SERVER names no program"),
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="no Chromium here, or no chromedriver"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    model = make_tiny(str(folder / "tiny.gguf"))
    with serving(model, folder, "--chat-template", "chatml", "-np", "2", "-b", "64", "--ignore-eos", "--cache-eviction",
                 "--max-cache-size", "128", "--min-cache-size", "64") as s:
        yield s


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


def open_page(browser, server, width=1280, height=850, scheme="light", keep=False):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.get(f"http://127.0.0.1:{server.port}/")
    if not keep:
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.refresh()
    wait(lambda: get(browser, "model").text != "")


def get(browser, name):
    return browser.find_element(By.ID, name)


def wait(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def ask(browser, text, n_tokens=24):
    """Sends a message with the keyboard alone; returns the reply's text."""
    field = get(browser, "max-tokens")
    browser.execute_script("arguments[0].value = arguments[1]", field, n_tokens)
    n = len(replies(browser))
    get(browser, "prompt").send_keys(text, Keys.ENTER)
    wait(lambda: len(replies(browser)) == n + 1 and get(browser, "send").is_displayed())
    return replies(browser)[-1].find_element(By.CLASS_NAME, "text").text


# Stands for the server: refuses with a status, is gone (0), or sends a piece, which may be empty, and then nothing more.
STAND_IN = """
const [status, piece] = arguments;
window.fetch = (address, { signal }) => new Promise((resolve, reject) => {
  if (status === 0) reject(new TypeError("gone"));
  else if (status !== 200) resolve(new Response('{"error": {"message": "no"}}', { status }));
  else resolve(new Response(new ReadableStream({ start(sink) {
    const delta = JSON.stringify({ choices: [{ delta: { content: piece } }] });
    if (piece) sink.enqueue(new TextEncoder().encode(`data: ${delta}\\n\\n`));
    signal.addEventListener("abort", () => sink.error(new DOMException("stopped", "AbortError")));
  } })));
});
"""


def shown(browser):
    return [message.text for message in browser.find_elements(By.CSS_SELECTOR, ".message .text")]


def kept(browser, where="session"):
    return [m["content"] for m in json.loads(browser.execute_script(f"return {where}Storage.getItem('deeptutor.messages')"))]


def replies(browser):
    return browser.find_elements(By.CSS_SELECTOR, ".message.assistant")


def picture(browser, name):
    if PICTURES:
        browser.save_screenshot(os.path.join(PICTURES, f"page-{name}.png"))


def complaints(browser):
    """What the browser has to say, Content-Security-Policy and failed requests included; reading pixels back is the test's doing."""
    return [entry for entry in browser.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING") and "willReadFrequently" not in entry["message"]
            and "readback" not in entry["message"]]


def test_a_conversation_and_what_is_kept(browser, server):
    open_page(browser, server)
    picture(browser, "empty")
    assert ask(browser, "word " * 120) != ""
    rows = browser.find_elements(By.CSS_SELECTOR, "#layers tbody tr")
    assert len(rows) == 2
    assert [row.find_elements(By.TAG_NAME, "td")[0].text for row in rows] == ["0", "1"]
    assert "/ 128" in rows[0].text
    label = rows[0].find_element(By.TAG_NAME, "canvas").get_attribute("aria-label")
    assert label.startswith("Layer 0 keeps ")
    painted = browser.execute_script(  # beginning, hole and end of the strip differ
        "const c = document.querySelector('#layers canvas'), x = c.getContext('2d');"
        "return [0, 0.3, 0.97].map((at) => Array.from(x.getImageData(Math.floor(at * c.width), 5, 1, 1).data).join());")
    assert painted[1] != painted[2]
    assert "of" in get(browser, "kv-bytes").text and "tokens/s" in get(browser, "decode-tps").text
    reused = get(browser, "reused").text
    ask(browser, "and more")  # the second turn goes on from the cache
    assert int(get(browser, "reused").text.split(" of ")[0].replace(",", "")) > int(reused.split(" of ")[0].replace(",", ""))
    picture(browser, "conversation")
    assert not complaints(browser)


def test_it_survives_a_reload_and_begins_anew(browser, server):
    open_page(browser, server)
    answer = ask(browser, "hello")
    open_page(browser, server, keep=True)
    assert len(replies(browser)) == 1 and replies(browser)[0].find_element(By.CLASS_NAME, "text").text == answer
    get(browser, "fresh").click()
    assert not replies(browser) and get(browser, "welcome").is_displayed()
    open_page(browser, server, keep=True)
    assert not replies(browser)


def test_stop_and_answer_again(browser, server):
    open_page(browser, server)
    field = get(browser, "max-tokens")
    browser.execute_script("arguments[0].value = 700", field)
    get(browser, "prompt").send_keys("go on")
    browser.execute_script(  # at once: a tiny model is too quick for a test that looks from outside
        "document.getElementById('composer').requestSubmit();"
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));")
    wait(lambda: get(browser, "send").is_displayed())
    assert get(browser, "status").text == "Stopped."
    server.wait_idle()
    browser.execute_script("arguments[0].value = 8", field)
    get(browser, "again").click()
    wait(lambda: get(browser, "send").is_displayed())
    assert len(replies(browser)) == 1


def test_an_answer_stays_until_there_is_another(browser, server):
    open_page(browser, server)
    ask(browser, "hello")
    before = shown(browser), kept(browser)
    assert len(before[0]) == 2
    for status, piece in ((0, ""), (429, ""), (503, ""), (200, ""), (200, " \n")):
        browser.execute_script(STAND_IN, status, piece)
        get(browser, "again").click()
        if status == 200:
            assert len(shown(browser)) == 2 and get(browser, "stop").is_displayed()
            get(browser, "stop").click()
        wait(lambda: get(browser, "send").is_displayed())
        assert (shown(browser), kept(browser)) == before and kept(browser, "local") == before[1], (status, piece)
        assert get(browser, "status").text != ""
    get(browser, "again").click()
    open_page(browser, server, keep=True)  # left before anything of the new one came
    assert (shown(browser), kept(browser)) == before
    browser.execute_script(STAND_IN, 200, "another")
    get(browser, "again").click()
    wait(lambda: shown(browser)[-1] == "another")
    get(browser, "stop").click()
    wait(lambda: get(browser, "send").is_displayed())
    assert shown(browser) == kept(browser) == kept(browser, "local") == ["hello", "another"]


def test_leaving_keeps_the_part_of_a_reply_that_has_come(browser, server):
    open_page(browser, server)
    browser.execute_script(STAND_IN, 200, "The first half")
    get(browser, "prompt").send_keys("hello", Keys.ENTER)
    wait(lambda: shown(browser) == ["hello", "The first half"])
    browser.execute_script(  # a phone puts the page away, and may end it there
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange')); delete document.hidden;")
    assert kept(browser) == ["hello", "The first half"]
    browser.execute_script(  # and elsewhere leaving need not hide it first
        "sessionStorage.setItem('deeptutor.messages', '[]'); localStorage.setItem('deeptutor.messages', '[{}]');"
        "Object.defineProperty(document, 'hidden', { value: false });")
    open_page(browser, server, keep=True)
    assert shown(browser) == kept(browser) == kept(browser, "local") == ["hello", "The first half"]
    browser.execute_script(STAND_IN, 200, "Gone")
    get(browser, "prompt").send_keys("more", Keys.ENTER)
    wait(lambda: shown(browser)[-1] == "Gone")
    browser.execute_script(  # left within the new chat, before the old one's reply has ended
        "document.getElementById('fresh').click(); dispatchEvent(new Event('pagehide'));")
    wait(lambda: get(browser, "send").is_displayed())
    assert shown(browser) == kept(browser) == []


def test_two_tabs(browser, server):
    open_page(browser, server)
    ask(browser, "one")
    first, tab = shown(browser), browser.current_window_handle
    instruct = "const s = document.getElementById('system'); s.value = arguments[0]; s.dispatchEvent(new Event('change'));"
    browser.execute_script(instruct, "Be brief.")
    browser.switch_to.new_window("tab")
    other = browser.current_window_handle
    try:
        open_page(browser, server, keep=True)
        assert shown(browser) == first and get(browser, "system").get_property("value") == "Be brief."  # begins with the last
        browser.execute_script("localStorage.setItem('deeptutor.messages', '[{\"role\": \"user\", \"content\": \"a third\"}]')")
        open_page(browser, server, keep=True)
        assert shown(browser) == first  # its own from the beginning, before anything was written in it
        get(browser, "fresh").click()
        browser.execute_script(instruct, "")
        browser.switch_to.window(tab)
        assert kept(browser, "local") == []
        open_page(browser, server, keep=True)
        assert shown(browser) == first and get(browser, "system").get_property("value") == "Be brief."
        assert kept(browser, "local") == kept(browser)  # which is more than the nothing that was there
        browser.switch_to.window(other)
        assert shown(browser) == []
        open_page(browser, server, keep=True)
        assert shown(browser) == []
        ask(browser, "two")
        second = shown(browser)
        browser.switch_to.window(tab)
        open_page(browser, server, keep=True)
        assert shown(browser) == first
        ask(browser, "three")
        assert len(shown(browser)) == 4 and shown(browser)[:2] == first
        browser.switch_to.window(other)
        open_page(browser, server, keep=True)
        assert shown(browser) == second
        assert kept(browser, "local")[0] == "one"
    finally:
        browser.switch_to.window(other)
        browser.close()
        browser.switch_to.window(tab)


def test_copy(browser, server):
    """Also where the browser has no clipboard for pages: at addresses without HTTPS but its own machine's."""
    for secure in (True, False):
        open_page(browser, server)
        browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
        ask(browser, "hello")
        browser.execute_script("window.copied = ''; document.addEventListener('copy', () => { window.copied = getSelection() + ''; });")
        if not secure:
            browser.execute_script("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true });")
        button = replies(browser)[-1].find_element(By.TAG_NAME, "button")
        button.click()
        wait(lambda: button.text == "Copied")
        if secure:
            copied = browser.execute_async_script("const done = arguments[0]; navigator.clipboard.readText().then(done, (e) => done('' + e));")
        else:
            copied = browser.execute_script("return window.copied;")
        assert copied.split() == kept(browser)[-1].split()


def test_without_room_beyond_the_tab(browser, server):
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": (
        "const set = Storage.prototype.setItem; Storage.prototype.setItem = function (name, value) {"
        "if (this === localStorage) throw new DOMException('full', 'QuotaExceededError'); set.call(this, name, value); };")})
    try:
        open_page(browser, server)
        assert ask(browser, "hello") != ""
        assert "until the tab is closed" in get(browser, "status").text
        before = shown(browser)
        open_page(browser, server, keep=True)
        assert shown(browser) == before
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_without_a_place_to_keep_anything(browser, server):
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": (
        "for (const name of ['localStorage', 'sessionStorage'])"
        "Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError'); } });")})
    try:
        open_page(browser, server, keep=True)
        assert ask(browser, "hello") != ""
        assert get(browser, "status").text == "This conversation is too long for the browser to keep over a reload."
        get(browser, "fresh").click()
        assert shown(browser) == []
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_settings_outlive_a_server_that_is_away(browser, server):
    """What it offers isn't known then, and another setting that is changed takes nothing of it along."""
    open_page(browser, server)
    Select(get(browser, "preset")).select_by_value("code")
    browser.execute_script("arguments[0].click()", get(browser, "evict"))
    chosen = get(browser, "evict").is_selected()
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/props"]})
    browser.refresh()
    wait(lambda: "server" in get(browser, "status").text)
    Select(get(browser, "language")).select_by_value("zh")
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    open_page(browser, server, keep=True)
    assert get(browser, "preset").get_attribute("value") == "code" and get(browser, "evict").is_selected() == chosen
    assert get(browser, "language").get_attribute("value") == "zh"
    complaints(browser)  # of /props


def test_a_server_that_came_back_with_other_settings(browser, server):
    open_page(browser, server)
    wait(lambda: get(browser, "preset").is_enabled())
    browser.execute_script(
        "const real = window.fetch; window.fetch = async (url, how) => {"
        "  if (url !== '/props') return new Response('{\"error\": {\"message\": \"not here\"}}', {status: 400});"
        "  const told = await (await real(url, how)).json(); told.model = 'another'; told.eviction.override = false;"
        "  return new Response(JSON.stringify(told)); };")
    get(browser, "prompt").send_keys("a", Keys.ENTER)
    wait(lambda: "not here" in get(browser, "status").text)
    wait(lambda: get(browser, "model").text == "another" and not get(browser, "preset").is_enabled())


def test_a_key_that_no_request_can_carry(browser, server):
    open_page(browser, server)
    browser.execute_script("arguments[0].value = 'schl\u00fcssel\u2192'", get(browser, "key"))
    get(browser, "prompt").send_keys("a", Keys.ENTER)
    wait(lambda: "the key has characters" in get(browser, "status").text)


def test_a_document(browser, server, tmp_path):
    open_page(browser, server)
    text, binary = tmp_path / "short story.txt", tmp_path / "picture.png"
    text.write_text("Once upon a time. " * 20)
    binary.write_bytes(b"\x89PNG\x00\xff\xfe")
    get(browser, "file").send_keys(str(text))
    wait(lambda: "short story.txt" in get(browser, "documents").text)
    get(browser, "file").send_keys(str(binary))
    wait(lambda: get(browser, "status").text == "picture.png is not a text file.")
    ask(browser, "What is it about?")
    first = browser.find_element(By.CSS_SELECTOR, ".message.user")
    assert "short story.txt" in first.text and "What is it about?" in first.text
    tokens = int(get(browser, "n-tokens").text.replace(",", ""))
    assert tokens > 100  # the document was read
    assert get(browser, "documents").text == ""


def test_a_refusal_is_shown_and_nothing_is_lost(browser, server):
    open_page(browser, server)
    browser.execute_script("arguments[0].value = -1", get(browser, "temperature"))
    get(browser, "prompt").send_keys("x x x", Keys.ENTER)
    wait(lambda: get(browser, "status").text.startswith("That did not work: "))
    assert not replies(browser) and "x x x" in browser.find_element(By.CSS_SELECTOR, ".message.user").text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_in_chinese(browser, server, scheme):
    open_page(browser, server, width=390, height=844, scheme=scheme)
    Select(get(browser, "language")).select_by_value("zh")
    assert get(browser, "send").text == "发送" and browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "zh-CN"
    ask(browser, "你好")
    picture(browser, f"phone-{scheme}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    overlap = browser.execute_script(
        "const a = document.getElementById('composer').getBoundingClientRect(), b = document.querySelector('aside')"
        ".getBoundingClientRect(); return a.bottom > b.top + 1;")
    assert not overlap
    open_page(browser, server, width=360, height=740, scheme=scheme)
    assert abs(browser.execute_script("return document.getElementById('fresh').getBoundingClientRect().top - "
                                      "document.getElementById('language').getBoundingClientRect().top;")) < 8
    Select(get(browser, "language")).select_by_value("zh")
    untranslated = browser.execute_script(
        "return Array.from(document.querySelectorAll('[data-text]')).filter((e) => /^[A-Za-z ,]+$/.test(e.textContent)).map("
        "(e) => e.dataset.text);")
    assert not untranslated


def test_everything_has_a_name_and_a_place_in_the_tab_order(browser, server):
    open_page(browser, server)
    nameless = browser.execute_script(
        "return Array.from(document.querySelectorAll('button, select, textarea, input:not([hidden])')).filter((e) => !("
        "e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.id);")
    assert not nameless
    seen = []
    for _ in range(30):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(browser.switch_to.active_element.get_attribute("id"))
    assert {"fresh", "language", "prompt", "attach", "send", "evict", "preset"} <= set(seen)


LINK = '<a href="https://a.example" target="_blank" rel="noopener noreferrer">'
MARKDOWN = [
    ("a **b** *c* `d<e>` ~~f~~", "<p>a <strong>b</strong> <em>c</em> <code>d&lt;e&gt;</code> <del>f</del></p>"),
    ("# H\ntext", "<h3>H</h3><p>text</p>"),
    ("1. a\n2. b\n   - c", "<ol start=\"1\"><li>a</li><li>b<ul><li>c</li></ul></li></ol>"),
    ("- a\n\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("```c\nif (a < b) *p = 1;\n```", "<pre><code>if (a &lt; b) *p = 1;</code></pre>"),
    ("```\nnot closed yet", "<pre><code>not closed yet</code></pre>"),
    ("| a | b |\n|---|:-:|\n| 1 | **2** |", "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>"
     "<strong>2</strong></td></tr></tbody></table>"),
    ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
    ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ("[https://b.example](https://a.example) `https://b.example`", f"<p>{LINK}https://b.example</a> "
     "<code>https://b.example</code></p>"),
    ("[**https://b.example** *c* `d` ~~_https://e_~~](https://a.example)", f"<p>{LINK}<strong>https://b.example</strong> "
     "<em>c</em> <code>d</code> <del><em>https://e</em></del></a></p>"),
    ("**[b](https://a.example)**", f"<p><strong>{LINK}b</a></strong></p>"),
    ("_https://a.example_", f"<p><em>{LINK}https://a.example</a></em></p>"),
    (">" * 5000, None),
    ("1. " * 5000, None),
    ("2*3*4 a_b_c **", "<p>2*3*4 a_b_c **</p>"),
    ("see https://a.example/b_(c).", None),
    ("", ""),
]


def test_markdown(browser, server):
    open_page(browser, server)
    render = ("const done = arguments[1]; import('/markdown.js').then((m) => { const box = document.createElement('div');"
              "box.append(m.render(arguments[0])); done(box.innerHTML); });")
    for text, wanted in MARKDOWN:
        found = browser.execute_async_script(render, text)
        assert wanted is None or found == wanted, text
        assert "<script" not in found and "<img" not in found
    for odd in ("a|b\n" + " " * 20000 + "-" + " " * 20000 + "x", "**a " * 9000, "`a ``b " * 9000, "[" * 30000):  # no time to wait for
        assert odd.split()[-1] in browser.execute_async_script(render, odd).replace("<code>", "").replace("</code>", "")
    link = browser.execute_async_script(render, "[x](https://a.example/b_(c)?d=1)")
    assert 'href="https://a.example/b_(c)?d=1"' in link and 'rel="noopener noreferrer"' in link


def test_events_cut_anywhere(browser, server):
    """The reader of the stream gives the same events wherever the pieces end."""
    open_page(browser, server)
    found = browser.execute_async_script(
        "const done = arguments[0]; import('/stream.js').then((m) => {"
        "const text = ': hi\\r\\nevent: tlc\\r\\ndata: {\"a\":1}\\r\\n\\r\\ndata: x\\ndata: y\\n\\ndata:z\\n\\n'; const out = [];"
        "for (let size = 1; size < text.length; size++) { const reader = new m.EventReader(), events = [];"
        "for (let i = 0; i < text.length; i += size) events.push(...reader.take(text.slice(i, i + size)));"
        "out.push(JSON.stringify(events)); } done(Array.from(new Set(out))); });")
    assert found == ['[{"event":"tlc","data":"{\\"a\\":1}"},{"event":"message","data":"x\\ny"},{"event":"message","data":"z"}]']
