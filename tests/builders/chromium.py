"""Headless Chromium, for tests of web pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

BROWSER, DRIVER = "chromium", "chromedriver"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")

WAIT_SECONDS = 120

FIND_FIELD = """
const named = [...document.querySelectorAll('label, .schema-form-property__label')]
    .filter(label => label.textContent.trim().replace(' (Optional)', '') === arguments[0]);
let around = named[0];
while (around && !around.querySelector('textarea, input, select')) around = around.parentElement;
return around && around.querySelector('textarea, input, select');
"""
"""JavaScript that finds the input of a label, in both of Prefect's user interfaces."""


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[webdriver.Chrome]:
    """Run Chromium with a page of this size; skip the test if it is not installed."""
    browser, driver = shutil.which(BROWSER), shutil.which(DRIVER)
    if browser is None or driver is None:
        pytest.skip(f"needs {BROWSER} and {DRIVER} on PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        running.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield running
    finally:
        running.quit()


def log_in(page: webdriver.Chrome, auth: str) -> None:
    """Fill in and submit Prefect's login page, which is open."""
    field = WebDriverWait(page, WAIT_SECONDS).until(
        lambda shown: shown.find_element(By.CSS_SELECTOR, "input[type=password]")
    )
    field.clear()
    field.send_keys(auth)
    page.find_element(By.CSS_SELECTOR, "button[type=submit]").click()


def open_summary(page: webdriver.Chrome, url: str, path: str, auth: str) -> WebElement:
    """Log in to the page of a run, click its artifacts and the summary, and return the title above its mistakes."""
    wait = WebDriverWait(page, WAIT_SECONDS)

    def clicked(found: WebElement) -> bool:
        try:
            found.click()
        except ElementClickInterceptedException:  # A message is in front of it.
            return False
        return True

    page.get(f"{url}/login?redirect={path}")
    log_in(page, auth)
    for link in (
        "//li[normalize-space(.)='Artifacts']",
        "//a[contains(., 'summary')][contains(@href, 'artifact')]",
    ):
        found = wait.until(lambda shown, link=link: shown.find_element(By.XPATH, link))
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        wait.until(lambda _shown, found=found: clicked(found))
    return wait.until(lambda shown: shown.find_element(By.XPATH, "//h2[contains(., 'Which images it gets wrong')]"))


def log_in_to_mlflow(page: webdriver.Chrome, url: str, auth: str) -> None:
    """Log in to MLflow, as a user does in the browser's dialog; the browser keeps the login."""
    user, _, password = auth.partition(":")
    # On a page without scripts: scripts of a page opened with a login in its URL may send no requests.
    page.get(f"{url.replace('://', f'://{quote(user)}:{quote(password)}@')}/version")


def find_field(page: webdriver.Chrome, label: str) -> WebElement:
    """Wait for the input of a label in a form, and return it."""
    return WebDriverWait(page, WAIT_SECONDS).until(lambda shown: shown.execute_script(FIND_FIELD, label))


def text_of(page: webdriver.Chrome) -> str:
    """Return the visible text of a page."""
    return str(page.execute_script("return document.body.innerText"))
