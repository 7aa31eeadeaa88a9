"""A browser without a window, for the pages that users see."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BROWSER, DRIVER = "chromium", "chromedriver"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[webdriver.Chrome]:
    """Run Chromium with a page of this size; skip the test where there is none."""
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
