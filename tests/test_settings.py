"""gunicorn's settings: each one does what gunicorn documents, or ends the start with one line."""

import os
import re
import shlex
import socket
from pathlib import Path

from tests.support.server import HERE, PATIENT, SHORT, STORED, fails_with, receive, wait_until
from tests.support.wire import CLOSE, MONSTERA, NOWHERE, Writers, post, receive_response, statuses

REFUSED = {  # Arguments, and the line that ends the start.
    "--certfile=cert.pem": "--certfile is not supported: .* use a proxy or a platform",
    "--keyfile=key.pem": "--keyfile is not supported: .* or use --worker-class gevent",
    "--proxy-protocol=v1": "--proxy-protocol is not supported",
    "--protocol=uwsgi": "--protocol is not supported",
    "--http-parser=fast": "--http-parser is not supported",
    "--http2-cleartext=upgrade": "--http2-cleartext is not supported",
    "--workers=0": "--workers and WEB_CONCURRENCY must not be 0",
    "--worker-connections=0": "--worker-connections, .* must not be 0",
    # gunicorn would ignore these words.
    "bind=[::1]:0": "^GUNICORN_CMD_ARGS must be like --name=value, unquoted: bind$",
    "--threads 1 \u2014bind=[::1]:0": "^GUNICORN_CMD_ARGS must be like .*: \u2014bind$",
    "'--bind [::1]:0'": "^GUNICORN_CMD_ARGS must be like .*: --bind .*$",
}


def test_a_setting_that_would_not_do_what_it_says_ends_the_start_in_one_line(serve, database):
    """The start makes no database. With --preload it may: gunicorn loads the application first."""
    servers = {arguments: serve(GUNICORN_CMD_ARGS=arguments) for arguments in REFUSED}
    for arguments, server in servers.items():
        fails_with(server, REFUSED[arguments])
        assert server.wait() == 1
    assert not database.exists()
    fails_with(server := serve("--preload"), "--preload is not supported: .* would stay behind")
    assert server.wait() == 1


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
    assert (set(writers.answers), writers.failures) == ({STORED}, [])


def test_a_start_with_reuse_port_prints_a_command_with_the_address_that_is_bound(serve):
    """With --reuse-port, workers open the listeners, after the master has printed the command."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as reserved:
        port = reserved.getsockname()[1]
        command = [HERE[0], f"--bind=127.0.0.1:{port}", "--reuse-port"]
        server = serve(command=command, PLANTS_TOKENS=None)
        wait_until(lambda: f"curl http://127.0.0.1:{port}/plants " in server.err)
        server.workers()


def test_a_start_on_all_addresses_of_ipv6_prints_a_command_with_one_that_a_client_can_use(serve):
    """[::] is only an address to listen at. The URL is quoted, since zsh expands brackets."""
    command = [HERE[0], "--bind=[::]:0"]
    server = serve(command=command, PLANTS_TOKENS=None, WEB_CONCURRENCY="1")
    wait_until(lambda: re.search(r"\ncurl 'http://\[::1\]:\d+'/plants ", server.err))


def test_a_start_on_a_unix_socket_prints_a_command_that_stores_a_plant(serve, tmp_path, stored):
    """The path of the socket is quoted for a shell, since it may contain spaces."""
    path = tmp_path / "a socket"
    command = [HERE[0], f"--bind=unix:{path}"]
    server = serve(command=command, PLANTS_TOKENS=None, WEB_CONCURRENCY="1")
    line = wait_until(lambda: re.search(r"\ncurl .*\n.*\n.*}'\n", server.err))[0]
    _, option, socket_path, url, *options = shlex.split(line.replace("\\\n", ""))
    assert (option, socket_path) == ("--unix-socket", str(path))
    assert url == "http://localhost/plants" and "A page" not in server.err
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_path)
        head = f"POST /plants HTTP/1.1\r\nHost: localhost\r\n{options[1]}\r\n{options[3]}\r\n"
        client.sendall(post(options[5].encode(), head=head.encode()))
        assert statuses(receive_response(client)) == [STORED]
    assert stored() == [(7, "Monstera", "indoor")]
