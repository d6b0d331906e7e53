"""Builds elements whose texts are escaped by the serializer: no string here is ever markup."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from fsdpsim.report.encode import scrub


def element(tag: str, *content: Element | str, css: str = "", **attributes: str) -> Element:
    """An element of texts and elements; ``css`` is its class, ``_`` in attribute names is ``-``."""
    made = Element(tag, {name.replace("_", "-"): scrub(v) for name, v in attributes.items()})
    if css:
        made.set("class", css)
    for part in content:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + clean(part)
        else:
            made.text = (made.text or "") + clean(part)
    return made


def clean(text: str) -> str:
    """``text`` without invisible characters, line by line."""
    return "\n".join(map(scrub, text.split("\n")))


def markup(*elements: Element) -> str:
    """The elements as HTML."""
    return "\n".join(tostring(e, encoding="unicode", method="html") for e in elements)
