"""The in-memory API over HTTP: what the real kubectl asks, and what an API server of version 1.32 answers."""

import datetime
import json
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.cluster_sim import kinds, patches, protobuf, selectors, tables
from tests.cluster_sim.kinds import kind_of
from tests.cluster_sim.store import Refusal, Thing
from tests.cluster_sim.websocket import STDERR, STDOUT, Channels

if TYPE_CHECKING:
    from tests.cluster_sim.cluster import Cluster

FOLLOW_S = 0.05  # between two looks at a log
OF_LOGS = {
    "container",
    "follow",
    "tailLines",
    "limitBytes",
    "previous",
}  # what we can do; the rest is refused
PATCHES = {
    "application/apply-patch+yaml": "apply",
    "application/strategic-merge-patch+json": "strategic",
    "application/merge-patch+json": "merge",
    "application/json-patch+json": "json",
}


class Handler(BaseHTTPRequestHandler):
    """One connection of kubectl."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # answers are small, and each is waited for
    cluster: "Cluster"  # of the subclass that serves it

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests look at what was asked, in Cluster.requests."""

    def answer(self, content: Any, code: int = 200, form: str = "application/json") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", form)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, form: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", form)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, content: bytes = b"") -> None:
        """Send a part; without content, the end."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def handle_any(self) -> None:
        address = urlsplit(self.path)
        self.many = parse_qs(address.query)
        self.query = {name: values[-1] for name, values in self.many.items()}
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else b""
        self.cluster.note(self.command, address.path, self.query, self.body)
        try:
            self.cluster.check_login()
            self.route(address.path.strip("/").split("/"))
        except Refusal as refusal:
            self.answer(refusal.status(), refusal.code)
        except selectors.BadSelector as error:
            self.answer(Refusal(400, "BadRequest", str(error)).status(), 400)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # kubectl was ended

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    # ---- Where a request goes
    def route(self, parts: list[str]) -> None:
        unknown = Refusal(404, "NotFound", "the server could not find the requested resource")
        if parts in (["version"], ["api"], ["apis"]):
            return self.answer(
                {
                    "version": kinds.SERVER,
                    "api": {"kind": "APIVersions", "versions": ["v1"]},
                    "apis": kinds.groups(),
                }[parts[0]]
            )
        if parts == ["openapi", "v3"]:
            return self.answer(kinds.openapi_index())
        inner = parts[2:] if parts[:2] == ["openapi", "v3"] else parts
        group_version, rest = (
            ("v1", inner[2:]) if inner[0] == "api" else ("/".join(inner[1:3]), inner[3:])
        )
        if group_version not in kinds.GROUP_VERSIONS:
            raise unknown
        if not rest:
            return self.answer(
                kinds.openapi(group_version)
                if inner is not parts
                else kinds.resources(group_version)
            )
        namespace = None
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, sub = [*rest, None, None][:3]
        kind = kinds.at(group_version, str(plural))
        if kind is None or len(rest) > 3 or sub not in (None, "log", "exec", "status"):
            raise unknown
        self.kind, self.namespace, self.name, self.sub = kind, namespace, name or "", sub
        self.dry = "dryRun" in self.query
        self.manager = (
            self.query.get("fieldManager")
            or self.headers.get("User-Agent", "unknown").partition("/")[0]
        )
        if kind.group == "authorization.k8s.io":
            return self.answer(self.cluster.review(self.decoded()), 201)
        self.cluster.check_right(self.verb(), kind, sub, namespace, self.name)
        if sub == "log":
            return self.logs()
        if sub == "exec":
            return self.exec()
        return {
            "GET": self.get,
            "POST": self.post,
            "PUT": self.put,
            "PATCH": self.patch,
            "DELETE": self.delete,
        }[self.command]()

    def verb(self) -> str:
        if self.sub == "exec":
            return "create"  # though it comes as GET with an upgrade
        if self.command == "GET":
            return (
                "get"
                if self.name
                else "watch"
                if self.query.get("watch") in ("1", "true")
                else "list"
            )
        return {
            "POST": "create",
            "PUT": "update",
            "PATCH": "patch",
            "DELETE": "delete" if self.name else "deletecollection",
        }[self.command]

    # ---- Reading
    def get(self) -> None:
        as_table = "as=Table" in self.headers.get("Accept", "")
        store, whole = self.cluster.store, self.query.get("includeObject") == "Object"
        if self.kind.kind == "Node" and not as_table:
            self.cluster.check_nodes_shown()
        if self.name:
            found = store.find(self.kind, self.namespace, self.name)
            return self.answer(
                tables.table(self.kind, [found], store.version, whole=whole) if as_table else found
            )
        if self.verb() == "watch":
            return self.watch(as_table, whole)
        with store.changed:
            things, version = (
                [thing for thing in store.list(self.kind, self.namespace) if self.selected(thing)],
                store.version,
            )
        if as_table:
            return self.answer(tables.table(self.kind, things, version, whole=whole))
        return self.answer(
            {
                "kind": f"{self.kind.kind}List",
                "apiVersion": self.kind.group_version,
                "metadata": {"resourceVersion": str(version)},
                "items": things,
            }
        )

    def selected(self, thing: Thing) -> bool:
        return selectors.labels_match(
            self.query.get("labelSelector", ""), thing["metadata"].get("labels") or {}
        ) and selectors.fields_match(self.query.get("fieldSelector", ""), self.kind, thing)

    def watch(self, as_table: bool, whole: bool) -> None:
        """Tell of changes until the time is up; before that, of what is there, if asked to."""
        store, deadline = (
            self.cluster.store,
            time.monotonic() + float(self.query.get("timeoutSeconds", 300)),
        )
        from_version = self.query.get("resourceVersion") or "0"
        initial = self.query.get("sendInitialEvents") == "true"
        self.stream("application/json")
        shown: set[tuple[str | None, str]] = set()

        def tell(type_: str, thing: Thing) -> bytes:
            if as_table and type_ != "BOOKMARK":
                thing = tables.table(
                    self.kind, [thing], store.version, headings=not shown, whole=whole
                )
            return json.dumps({"type": type_, "object": thing}).encode() + b"\n"

        with store.changed:
            seen, events = store.version, []
            for thing in store.list(self.kind, self.namespace):
                place = (thing["metadata"].get("namespace"), thing["metadata"]["name"])
                if self.selected(thing) and (initial or from_version == "0"):
                    events.append(tell("ADDED", thing))
                    shown.add(place)
                elif self.selected(thing) and int(thing["metadata"]["resourceVersion"]) <= int(
                    from_version
                ):
                    shown.add(place)
            if initial:  # kubectl waits for a word that this was all
                events.append(
                    tell(
                        "BOOKMARK",
                        {
                            "kind": self.kind.kind,
                            "apiVersion": self.kind.group_version,
                            "metadata": {
                                "resourceVersion": str(seen),
                                "annotations": {"k8s.io/initial-events-end": "true"},
                            },
                        },
                    )
                )
            elif from_version != "0":
                seen = int(from_version)
        while not self.cluster.closing and time.monotonic() < deadline:
            for event in events:
                self.chunk(event)
            events = []
            with store.changed:
                if store.version == seen:
                    store.changed.wait(0.5)
                for change in store.since(seen):
                    kind, namespace, name = change.key
                    if kind != self.kind or self.namespace not in (None, namespace):
                        continue
                    known, matches = (namespace, name) in shown, self.selected(change.thing)
                    if change.type == "DELETED" or not matches:
                        if known:
                            events.append(tell("DELETED", change.thing))
                            shown.discard((namespace, name))
                    else:
                        events.append(tell("MODIFIED" if known else "ADDED", change.thing))
                        shown.add((namespace, name))
                seen = store.version
        self.chunk()

    def logs(self) -> None:
        unable = self.query.keys() - (
            OF_LOGS if self.query.get("follow") == "true" else {*OF_LOGS, "timestamps"}
        )
        if unable:
            raise Refusal(
                400, "BadRequest", f"not in this API: {', '.join(sorted(unable))} of logs"
            )
        pod = self.cluster.store.find(self.kind, self.namespace, self.name)
        container = self.container_of(pod)
        if self.query.get("previous") == "true":
            raise Refusal(
                400,
                "BadRequest",
                f'previous terminated container "{container}" in pod "{self.name}" not found',
            )
        waiting = next(
            (
                s["state"]["waiting"].get("reason", "ContainerCreating")
                for s in pod.get("status", {}).get("containerStatuses", [])
                if "waiting" in s["state"]
            ),
            None,
        )
        if self.cluster.log_of(self.name) is None and (
            waiting or pod["status"].get("phase") == "Pending"
        ):
            raise Refusal(
                400,
                "BadRequest",
                f'container "{container}" in pod "{self.name}" is waiting to start: '
                f"{waiting or 'ContainerCreating'}",
            )
        said = self.cluster.log_of(self.name) or b""
        sent = len(said)
        if "tailLines" in self.query:
            lines = said.splitlines(keepends=True)
            said = b"".join(lines[max(0, len(lines) - int(self.query["tailLines"])) :])
        if "limitBytes" in self.query:
            said = said[: int(self.query["limitBytes"])]
        if (
            self.query.get("timestamps") == "true"
        ):  # the time of asking: that of writing is not kept
            clock = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S.%f}789Z ".encode()
            said = b"".join(clock + line for line in said.splitlines(keepends=True))
        if self.query.get("follow") != "true":
            return self.answer(said, form="text/plain")
        self.stream("text/plain")
        ended = False
        while True:
            if said:
                self.chunk(said)
            if ended or self.cluster.closing:
                return self.chunk()
            time.sleep(FOLLOW_S)
            ended = self.cluster.ended(self.namespace, self.name)
            whole = self.cluster.log_of(self.name) or b""
            said, sent = whole[sent:], len(whole)

    def container_of(self, pod: Thing) -> str:
        names = [container["name"] for container in pod["spec"]["containers"]]
        wanted = self.query.get("container") or names[0]
        if wanted not in names:
            raise Refusal(400, "BadRequest", f"container {wanted} is not valid for pod {self.name}")
        return str(wanted)

    def exec(self) -> None:
        pod = self.cluster.store.find(kind_of("Pod"), self.namespace, self.name)
        container = self.container_of(pod)
        if pod["status"].get("phase") != "Running":
            raise Refusal(
                500,
                "InternalError",
                f'unable to upgrade connection: container not found ("{container}")',
            )
        if self.headers.get("Upgrade", "").lower() != "websocket":
            raise Refusal(
                400,
                "BadRequest",
                "unable to upgrade: you must specify at least 1 of stdin, stdout, stderr",
            )
        channels = Channels(self)
        try:
            said = {"stdin": channels.stdin()} if self.query.get("stdin") == "true" else {}
            code, *outputs = self.cluster.exec(
                self.name, container, self.many.get("command", []), **said
            )
            for channel, output in zip((STDOUT, STDERR), outputs, strict=False):
                channels.send(channel, output)
            channels.end(code)
        except EOFError:
            pass  # it was ended over there

    # ---- Writing
    def post(self) -> None:
        thing = self.decoded()
        self.answer(
            self.cluster.store.create(self.kind, self.namespace, thing, self.manager, dry=self.dry),
            201,
        )

    def put(self) -> None:
        key = (self.kind, self.namespace, self.name)
        self.answer(self.cluster.store.update(key, self.decoded(), self.manager, dry=self.dry))

    def patch(self) -> None:
        store, key = self.cluster.store, (self.kind, self.namespace, self.name)
        how = PATCHES.get(self.headers.get("Content-Type", ""))
        if how is None:
            raise Refusal(
                415, "UnsupportedMediaType", f"{self.headers.get('Content-Type')} is no patch"
            )
        if how == "apply":
            if key not in store.things:
                self.cluster.check_right("create", self.kind, None, self.namespace, self.name)
            thing, new = store.apply(
                *key,
                self.decoded(),
                self.manager,
                force=self.query.get("force") == "true",
                dry=self.dry,
            )
            return self.answer(thing, 201 if new else 200)
        old, change = store.find(*key), json.loads(self.body)
        try:
            new_thing = (
                patches.json_patch(old, change)
                if how == "json"
                else patches.merge(old, change, strategic=how == "strategic")
            )
        except patches.BadPatch as error:
            raise Refusal(422, "Invalid", str(error)) from None
        if self.sub == "status":
            return self.answer(
                store.update(key, {**old, "status": new_thing["status"]}, self.manager, system=True)
            )
        self.answer(store.update(key, new_thing, self.manager, dry=self.dry))

    def delete(self) -> None:
        store, options = self.cluster.store, json.loads(self.body) if self.body else {}
        with store.changed:
            names = (
                [self.name]
                if self.name
                else [
                    thing["metadata"]["name"]
                    for thing in store.list(self.kind, self.namespace)
                    if self.selected(thing)
                ]
            )
            for name in names:
                key = (self.kind, self.namespace, name)
                grace = self.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
                how = (
                    self.query.get("propagationPolicy")
                    or options.get("propagationPolicy")
                    or "Background"
                )
                thing = store.delete(
                    key,
                    propagation=how,
                    grace=None if grace is None else int(grace),
                    dry=bool(self.dry or options.get("dryRun")),
                )
                if self.name and key in store.things:
                    return self.answer(thing)
        details = {"name": self.name, "group": self.kind.group, "kind": self.kind.plural}
        if self.name:
            details["uid"] = thing["metadata"]["uid"]
        self.answer(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Success",
                "details": details,
            }
        )

    def decoded(self) -> Thing:
        if protobuf.MEDIA_TYPE in self.headers.get("Content-Type", ""):
            thing = protobuf.decoded(self.body)
            if thing is None:
                raise Refusal(
                    415,
                    "UnsupportedMediaType",
                    f"{self.kind.kind} as a protocol buffer is not in this API",
                )
        else:
            thing = yaml.safe_load(
                self.body
            )  # JSON is YAML, and server-side apply sends the latter
        if (thing.get("apiVersion"), thing.get("kind")) != (
            self.kind.group_version,
            self.kind.kind,
        ):
            raise Refusal(
                400,
                "BadRequest",
                f"the API version in the data ({thing.get('apiVersion')}) does not match "
                f"the expected API version ({self.kind.group_version})",
            )
        return thing  # type: ignore[no-any-return]


def handler_for(cluster: "Cluster") -> type[Handler]:
    return type("Handler", (Handler,), {"cluster": cluster})
