"""Label and field selectors, as a list, a watch and a deletion are asked for."""

import re
from typing import Any

from tests.cluster_sim.kinds import Kind

TERM = re.compile(
    r"(?P<not>!)?(?P<key>[\w./-]+)\s*(?:(?P<op>==|=|!=)\s*(?P<value>[\w.-]*)|"
    r"\s(?P<set>in|notin)\s*\((?P<values>[^)]*)\))?\s*"
)
FIELDS = {
    "Pod": ("spec.nodeName", "spec.restartPolicy", "status.phase", "status.podIP"),
    "Job": ("status.successful",),
    "Namespace": ("status.phase",),
    "Secret": ("type",),
    "Node": ("spec.unschedulable",),
    "Event": (
        "involvedObject.kind",
        "involvedObject.name",
        "involvedObject.namespace",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "type",
        "source",
        "reportingComponent",
    ),
}


class BadSelector(ValueError):
    """It cannot be read, or asks for a field that the kind is not indexed by."""


def labels_match(selector: str, labels: dict[str, str]) -> bool:
    for text in filter(None, re.split(r",(?![^(]*\))", selector)):
        term = TERM.fullmatch(text.strip())
        if term is None or (term["not"] and (term["op"] or term["set"])):
            raise BadSelector(f'unable to parse requirement: "{text}"')
        has, value = term["key"] in labels, labels.get(term["key"])
        if term["op"]:
            good = (value == term["value"]) != (term["op"] == "!=")
        elif term["set"]:
            good = (value in [v.strip() for v in term["values"].split(",")]) == (
                term["set"] == "in"
            )
        else:
            good = has != bool(term["not"])
        if not good:
            return False
    return True


def fields_match(selector: str, kind: Kind, thing: dict[str, Any]) -> bool:
    for text in filter(None, selector.split(",")):
        field, operator, value = (
            re.fullmatch(r"([\w.]+?)(==|!=|=)(.*)", text).groups()
            if re.fullmatch(r"([\w.]+?)(==|!=|=)(.*)", text)
            else (text, "", "")
        )
        if not operator or field not in (
            "metadata.name",
            "metadata.namespace",
            *FIELDS.get(kind.kind, ()),
        ):
            raise BadSelector(f"field label not supported: {field}")
        found: Any = thing
        for part in field.split("."):
            found = (found or {}).get(part)
        if (str(found or "") == value) == (operator == "!="):
            return False
    return True
