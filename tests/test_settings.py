"""gunicorn's settings: each one does what gunicorn documents, or the start fails with one line."""

import os
import socket
from pathlib import Path

from tests.support.server import HERE, PATIENT, SHORT, STORED, fails_with, receive, wait_until
from tests.support.wire import CLOSE, MONSTERA, NOWHERE, Writers, answers, post, statuses

REFUSED = {  # Arguments, and the line with which the start fails.
    "--certfile=cert.pem": "--certfile is not supported: .* use a proxy or a platform",
    "--keyfile=key.pem": "--keyfile is not supported: .* or use --worker-class gevent",
    "--proxy-protocol=v1": "--proxy-protocol is not supported",
    "--workers=0": "--workers and WEB_CONCURRENCY must not be 0",
    "--worker-connections=0": "--worker-connections, .* must not be 0",
    # gunicorn would ignore these words.
    "bind=[::1]:0": "^GUNICORN_CMD_ARGS must be like --name=value, with no quotes .*: bind$",
    "--threads 1 \u2014bind=[::1]:0": "^GUNICORN_CMD_ARGS must be like .*: \u2014bind$",
    "'--bind [::1]:0'": "^GUNICORN_CMD_ARGS must be like .*: --bind .*$",
}


def test_a_setting_that_would_not_do_what_it_says_ends_the_start_in_one_line(serve, database):
    """The start makes no database."""
    servers = {arguments: serve(GUNICORN_CMD_ARGS=arguments) for arguments in REFUSED}
    for arguments, server in servers.items():
        fails_with(server, REFUSED[arguments])
        assert server.wait() == 1
    assert not database.exists()


def test_another_application_is_not_preloaded(serve):
    """Greenlets would share what the application keeps for each client, such as the request."""
    server = serve("bottle:app", "--preload")
    fails_with(server, "--preload would mix up the clients of bottle:app: leave it out")


def test_with_keep_alive_0_a_connection_ends_after_one_response(serve, send):
    """The response says so. A client may still connect some time before it sends its request."""
    server = serve(PATIENT, "--keep-alive=0", WEB_CONCURRENCY="1")
    slow = send(server)
    assert CLOSE in server.send(post(MONSTERA)) and server.health() == 200
    opened = Path(f"/proc/{server.workers(1)[0]}/fd").iterdir()
    heartbeat = next(each for each in opened if "/wgunicorn-" in os.readlink(each))
    # It is in shared memory, where a disk that hangs can't stop the worker from writing to it.
    assert os.readlink(heartbeat).startswith("/dev/shm/")
    for _ in range(2):  # The worker looks at its clocks between two heartbeats.
        before = heartbeat.stat().st_mtime_ns
        wait_until(lambda before=before: heartbeat.stat().st_mtime_ns != before)
    slow.sendall(NOWHERE * 2)
    response = receive(slow)
    assert statuses(response) == [404] and CLOSE in response


def test_a_worker_ends_after_max_requests_and_no_client_notices(serve):
    """Another worker takes its place each time."""
    server = serve(SHORT, "--max-requests=50", "--max-requests-jitter=10", WEB_CONCURRENCY="1")
    with Writers(server.port) as writers:
        wait_until(lambda: server.err.count("Booting worker") > 2)
    assert all(status == STORED for status in writers.answers) and not writers.failures


def test_a_start_with_reuse_port_prints_a_command_with_the_address_that_is_bound(serve):
    """With --reuse-port, workers open the listeners, after the master has printed the command."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as reserved:
        port = reserved.getsockname()[1]
        command = [HERE[0], f"--bind=127.0.0.1:{port}", "--reuse-port"]
        server = serve(command=command, PLANTS_TOKENS=None)
        wait_until(lambda: f"curl http://127.0.0.1:{port}/plants " in server.err)
        server.workers()


def test_a_service_that_listens_on_no_tcp_address_says_that_it_needs_a_token(serve, tmp_path):
    """The command with the run's token is printed only if a client can use it."""
    command = [HERE[0], f"--bind=unix:{tmp_path}/socket"]
    server = serve(command=command, PLANTS_TOKENS=None, WEB_CONCURRENCY="1")
    wait_until(lambda: "PLANTS_TOKENS is not set, so no client can store a plant" in server.err)


OTHER = """
def app(environ, start_response):
    start_response("200 OK", [])
    return [b"other"]
"""


def test_another_application_runs_without_a_database_of_ours(serve, database, tmp_path):
    """It is not called for a request that the parser refuses. Its workers end quietly, too."""
    (tmp_path / "other.py").write_text(OTHER)
    options = ["other:app", f"--pythonpath={tmp_path}", SHORT]
    server = serve(*options, PLANTS_TOKENS=None, WEB_CONCURRENCY="1")
    assert server.send(NOWHERE, ends=True).endswith(b"other")
    expected = {"error": 400, "message": "the request is not valid HTTP"}
    assert answers(server.send(b"nonsense\r\n\r\n")) == [(400, expected)]
    assert server.stop() == 0 and not server.said() and not database.exists()
