"""Measures what WCAG 2.2 asks of a page: how far texts and signs stand out from what is behind them."""

from __future__ import annotations

from tests.fakes.browser import Tab

SIGNS = ".key, .line, .meter-fill"  # tell something by their colour

# Colours as they are seen: of all elements around, over each other, with their opacity. A text has to have
# 4.5:1, a large one 3:1, and so has a sign or its border. What is disabled may be pale; no canvas is read.
MEASURE = """(() => {
  const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true }), read = new Map();
  const parsed = (text) => {
    if (!read.has(text)) {
      brush.clearRect(0, 0, 1, 1);
      brush.fillStyle = text;
      brush.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data;
      read.set(text, [[r, g, b], a / 255]);
    }
    return read.get(text);
  };
  const mix = (over, under, share) => over.map((value, at) => share * value + (1 - share) * under[at]);
  const laid = (text, under) => mix(parsed(text)[0], under, parsed(text)[1]);
  const surfaces = new Map([[null, { inner: parsed("Canvas")[0], seen: (colour) => colour }]]);
  const surface = (element) => {
    if (!surfaces.has(element)) {
      const around = surface(element.parentElement), style = getComputedStyle(element);
      const [drawn] = style.backgroundImage.match(/(rgb|color)[(][^)]*[)]/) ?? [style.backgroundColor];
      surfaces.set(element, {
        inner: laid(drawn, around.inner),
        seen: (colour) => around.seen(mix(colour, around.inner, Number(style.opacity))),
      });
    }
    return surfaces.get(element);
  };
  const light = (colour) => colour.reduce((sum, value, at) => {
    const part = value / 255, linear = part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    return sum + linear * [0.2126, 0.7152, 0.0722][at];
  }, 0.05);
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return high / low;
  };
  const found = new Set();
  const text = (element, style, what) => {
    const { inner, seen } = surface(element), size = parseFloat(style.fontSize);
    const ink = element.closest("svg") ? style.fill : style.color;
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const got = parsed(ink)[1] ? ratio(seen(laid(ink, inner)), seen(inner)) : least; // nobody is to see it
    if (got < least) found.add(`${what.trim().slice(0, 40)}: ${got.toFixed(2)}`);
  };
  const sign = (element, style) => {
    const { inner, seen } = surface(element), around = surface(element.parentElement);
    const edge = style.borderTopWidth === "0px" ? inner : laid(style.borderTopColor, inner);
    const got = Math.max(...[inner, edge].map((colour) => ratio(seen(colour), around.seen(around.inner))));
    if (got < 3) found.add(`${element.className} of ${element.parentElement.textContent}: ${got.toFixed(2)}`);
  };
  for (const element of document.body.querySelectorAll("*")) {
    const shown = element.checkVisibility({ visibilityProperty: true });
    if (!shown || element.matches(":disabled, option, script")) continue;
    const style = getComputedStyle(element);
    const texts = [...element.childNodes].filter(({ data }) => data?.trim());
    if (texts.length) text(element, style, texts[0].data);
    if (element.placeholder) text(element, getComputedStyle(element, "::placeholder"), element.placeholder);
    if (element.matches(SIGNS)) sign(element, style);
  }
  return [...found];
})()"""


async def pale(tab: Tab) -> list[str]:
    """Return the texts and signs that do not stand out on the page as shown."""
    return await tab.run(MEASURE.replace("SIGNS", f'"{SIGNS}"'))
