"""report.html and statement.html in a real browser, headless: chromium with its driver, through selenium."""

import http.server
import shlex
import shutil
import threading

import pytest
from planted import DIAGNOSIS, HOSTILE, each_outcome, planted
from test_report_pages import hostile  # noqa: F401, a fixture

from conformance.cases import all_cases
from conformance.report.page import report_page
from conformance.report.statement import statement, statement_page
from conformance.verdict import Outcome, Verdict

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed: pip install selenium"
)
CHROME = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROME and DRIVER),
    reason="no chromium with chromedriver on the path: apt-get install chromium chromium-driver",
)

WIDE, PHONE = (1280, 1000), (390, 844)
TITLE = "linear  a16  bf16"
DECLINED = "linear/w3-g128-asym/a16/bf16/m1-n64-k128/random-0"
FAULTY = "linear/w3-g32-asym/a16/bf16/m17-n72-k544-bias/random-0"


@pytest.fixture(scope="module")
def browser():
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROME
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of three backends with every outcome, and the statement on one of them."""
    folder = tmp_path_factory.mktemp("pages")
    cases = [i for i, c in all_cases().items() if c.quick and i != FAULTY]
    wrong = Verdict(
        FAULTY,
        "mine",
        Outcome.DIVERGES,
        "it computes something else",
        worst=41.5,
        elements=9,
        diagnosis=DIAGNOSIS,
    )
    verdicts = [
        *each_outcome("mixed", cases), wrong, Verdict(DECLINED, "mine", Outcome.DECLINES, "no"),
        *(Verdict(c, "right", Outcome.CONFORMS, worst=(i % 21) / 20, elements=9) for i, c in enumerate(cases)),
    ]  # fmt: skip
    report = folder / "report.json"
    document = planted(report, verdicts, specs={"mine": "my file.py:mine"})
    (folder / "report.html").write_text(report_page(document))
    (folder / "statement.html").write_text(statement_page(statement(report, "ACME", "mixed", None)))
    return folder


def opened(browser, path, size=WIDE, scheme="light"):
    """Load a page at a size and in a scheme; it has drawn itself, and the console is empty."""
    width, height = size
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get(path if "://" in str(path) else path.as_uri())
    if "report" in str(path):
        until(browser, "return document.body.dataset.ready === 'yes'")
    assert browser.get_log("browser") == []


def until(browser, script):
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(script))


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector
    )


def choose(browser, what, value):
    browser.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))",
        what, value,
    )  # fmt: skip
    assert browser.execute_script("return document.getElementById(arguments[0]).value", what) == value


def click_cell(browser, label):
    """Click the cell whose label for screen readers begins so."""
    from selenium.webdriver.common.by import By

    cell = browser.find_element(By.CSS_SELECTOR, f'#drawn button[aria-label^="{label}"]')
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    cell.click()
    until(browser, "return !document.getElementById('panel').hidden")
    return browser.execute_script("return document.getElementById('panel').innerText")


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desktop", "phone"])
def test_a_click_on_a_cell_shows_the_case(browser, pages, size):
    opened(browser, pages / "report.html", size)
    choose(browser, "backend", "mine")
    choose(browser, "operation", "linear")
    shown = click_cell(browser, f"mine, {TITLE}, w3 g32 asym: diverges 1")
    for words in (
        FAULTY, "✗ diverges", "worst error 41.5 of what is allowed", "it computes something else",
        "weights with zero points one too large (zero_point_plus_one), 0 bounds away", "41.5 bounds away",
        "zero_point_ignored, 12.3 bounds away", "all 7 rows", "C17",
        f"quantcts run --backend 'my file.py:mine' --cases {FAULTY}",
    ):  # fmt: skip
        assert words in shown, words
    box = browser.execute_script("return document.getElementById('panel').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= size[0]
    browser.execute_script("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.execute_script("return document.getElementById('panel').hidden")
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("page", ["report.html", "statement.html"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_never_scrolls_sideways(browser, pages, page, width):
    opened(browser, pages / page, (width, 844))
    operations = texts(browser, "#operation option")
    for operation in operations or [""]:
        if operation:
            choose(browser, "backend", "all, side by side")
            choose(browser, "operation", operation)
        inside, room = browser.execute_script(
            "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
        )
        assert width - 20 < room <= width
        assert inside <= room, operation


def test_every_matrix_is_drawn(browser, pages):
    opened(browser, pages / "report.html")
    for operation in ("packing", "linear", "moe", "conduct"):
        choose(browser, "backend", "right")
        choose(browser, "operation", operation)
        cases = [i for i, c in all_cases().items() if c.quick and i != FAULTY and c.operation == operation]
        counts = browser.execute_script(
            "return [...document.querySelectorAll('#drawn button')].map(b => +b.title.match(/conforms (\\d+)/)[1])"
        )
        assert sum(counts) == len(cases)
    choose(browser, "operation", "linear")
    click_cell(browser, f"right, {TITLE}, w4 g128 sym")
    inside = [i for i, c in all_cases().items() if c.quick and c.cell == "linear/w4-g128-sym/a16/bf16"]
    assert sorted(texts(browser, "#panel summary code")) == sorted(inside)
    choose(browser, "backend", "all, side by side")
    names = browser.execute_script(
        "return [...document.querySelectorAll('#drawn h4')].map(h => h.textContent)"
    )
    assert set(names) == {"mine", "mixed", "right"}


def test_the_other_ways_in(browser, pages):
    """From the table of backends to the matrices, from a finding to its case."""
    opened(browser, pages / "report.html")
    browser.execute_script("document.querySelector('button[data-backend=mixed][data-operation=moe]').click()")
    titles = browser.execute_script(
        "return [...document.querySelectorAll('#drawn h3')].map(h => h.textContent)"
    )
    assert titles
    assert all(title.startswith("moe ") for title in titles)
    browser.execute_script("document.querySelector(`button[data-case='${arguments[0]}']`).click()", FAULTY)
    until(browser, "return !document.getElementById('panel').hidden")
    assert FAULTY in browser.execute_script("return document.querySelector('#panel summary').innerText")
    assert browser.get_log("browser") == []


CONTRAST = """
  const light = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * light(r / 255) + 0.7152 * light(g / 255) + 0.0722 * light(b / 255);
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.getClientRects().length || ["SCRIPT", "STYLE", "OPTION"].includes(node.tagName)) continue;
    let behind = node;
    while (behind && numbers(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const back = behind ? numbers(getComputedStyle(behind).backgroundColor) : [0, 0, 0];
    const [a, b] = [luminance(numbers(getComputedStyle(node).color)), luminance(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, node.tagName + "." + node.className, node.textContent.slice(0, 30)]);
  }
  return found;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(browser, pages, scheme):
    """WCAG's 4.5 to 1 for all text, in every state that is drawn, and each state has a sign of its own."""
    opened(browser, pages / "report.html", scheme=scheme)
    choose(browser, "backend", "all, side by side")
    choose(browser, "operation", "linear")
    click_cell(browser, f"mine, {TITLE}, w3 g32 asym")
    found = browser.execute_script(CONTRAST)
    assert len(found) > 500
    assert min(found)[0] >= 4.5, min(found)
    kinds = {name.partition(".")[2] for _, name, _ in found if name.startswith("BUTTON.")}
    assert kinds >= {"conforms", "conforms h1", "conforms h2", "conforms h3", "conforms h4"}
    assert kinds >= {"diverges", "dishonest", "crashes", "waived", "declines"}
    signs = browser.execute_script(
        "return [...document.querySelectorAll('#legend .key:not(.heat)')].map(k => k.innerText)"
    )
    assert len(set(signs)) == 6
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(255, 255, 255)") is (scheme == "light")


def test_hostile_text_does_nothing(browser, hostile, tmp_path):  # noqa: F811
    path = tmp_path / "report.html"
    path.write_text(report_page(hostile))
    opened(browser, path)
    before = browser.execute_script("return document.querySelectorAll('script, img').length")
    for operation in browser.execute_script(
        "return [...document.querySelectorAll('#operation option')].map(o => o.value)"
    ):
        choose(browser, "operation", operation)
    choose(browser, "operation", "linear")
    browser.execute_script("document.querySelector('button[data-case]').click()")
    until(browser, "return !document.getElementById('panel').hidden")
    browser.execute_script("document.querySelectorAll('#panel details').forEach(d => d.open = true)")
    until(browser, "return document.getElementById('panel').innerText.includes('alert(1)')")
    assert HOSTILE in browser.execute_script("return document.getElementById('panel').textContent")
    command = shlex.split(texts(browser, "#panel pre")[0])
    assert command[:2] == ["quantcts", "run"]
    assert [HOSTILE, texts(browser, "#panel summary code")[0]] == [command[3], command[5]]
    assert browser.execute_script("return document.querySelectorAll('script, img').length") == before
    assert browser.get_log("browser") == []


def test_it_asks_the_network_for_nothing(browser, pages):
    """Served by a server that counts: one request, the page itself."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(pages))

        def log_message(self, *what):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened(browser, f"http://127.0.0.1:{server.server_port}/report.html")
        choose(browser, "backend", "mixed")
        choose(browser, "operation", "linear")
        click_cell(browser, "mixed, linear")
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        server.shutdown()
    assert asked == ["/report.html"]
    assert [name for name in loaded if not name.startswith("data:")] == []
