"""What else stops the start, and what does not."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.support.server import HERE, PATIENCE
from tests.test_start import stops_in_one_line


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PLANTS_TOKENS": ""}, "PLANTS_TOKENS must be .*token_urlsafe"),
        ({"DATABASE_URL": "sqlite:////dev/full"}, "/dev/full is empty or another program's"),
        ({"DATABASE_URL": "sqlite:///a%00b"}, "DATABASE_URL must name a file"),
        ({"PLANTS_CORS_ORIGINS": "garden.example"}, "PLANTS_CORS_ORIGINS must be"),
        ({"PORT": ""}, "PORT must be a number from 1 to 65535, not ''"),
        ({"PORT": "0"}, "PORT must be a number from 1 to 65535, not '0'"),
        ({"PORT": "65536"}, "PORT must be a number from 1 to 65535, not '65536'"),
        ({"WEB_CONCURRENCY": "0"}, "WEB_CONCURRENCY must be a number from 1 to"),
        ({"WEB_CONCURRENCY": "-1"}, "must be positive|WEB_CONCURRENCY"),
    ],
    ids=str,
)
def test_a_wrong_setting_stops_the_start_in_one_line(serve, environment, words):
    """The line says which and what to do; the master has started no worker."""
    stops_in_one_line(serve(**environment), words)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--preload", "--preload is not possible, leave it out"),
        ("--certfile=c", "--certfile and --keyfile are not possible, leave them out: a proxy"),
        ("--keyfile=k", "--certfile and --keyfile are not possible, leave them out: a proxy"),
        ("--worker-class=asgi", "--worker-class asgi is not possible, leave it out"),
        ("--worker-class=gevent_pywsgi", "--worker-class gevent_pywsgi is not possible"),
    ],
)
def test_an_option_that_would_fail_later_stops_the_start(serve, option, words):
    """In one line, like a setting."""
    stops_in_one_line(serve(option), words)


@pytest.mark.parametrize("setting", ["", "many"])
def test_gunicorn_itself_stops_where_web_concurrency_is_no_number(serve, setting):
    """It reads the variable before it reads gunicorn.conf.py, so the line is not ours."""
    server = serve(WEB_CONCURRENCY=setting)
    server.may_fail = True
    assert server.wait() != 0
    assert "invalid literal for int()" in server.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_process_of_a_container_can_be_stopped_while_it_starts(serve, number):
    """For such a process, the system ignores signals that it has no handler for."""
    with socket.create_server(("127.0.0.1", 0)) as database:  # accepts, and never answers
        database.settimeout(PATIENCE)
        host = f"127.0.0.1:{database.getsockname()[1]}"
        server = serve(
            command=["unshare", "--pid", "--fork", "--kill-child", *HERE],
            DATABASE_URL=f"postgresql://{host}/plants?connect_timeout=600",
        )
        with database.accept()[0]:
            unshare = server.process.pid
            (first,) = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
            os.kill(int(first), number)
            assert server.wait() == 128 + number
    assert "not available at the start" not in server.err


def test_a_port_in_use_is_told_with_what_to_type(serve):
    """gunicorn tries for some seconds, in which the other program may end."""
    first = serve()
    server = serve(command=[*HERE[:-1], f"127.0.0.1:{first.port}"])
    assert server.wait() == 1
    advice = "; ss -ltnp shows by whom; to listen elsewhere: --bind 127.0.0.1:8001\n"
    assert f"Connection in use: ('127.0.0.1', {first.port}){advice}" in server.err
    assert server.err.count("Booting worker") == 0


def test_the_settings_that_the_service_depends_on(serve):
    """As gunicorn has them after it has read gunicorn.conf.py and its defaults."""
    server = serve("--print-config")
    assert server.wait() == 0
    settings = dict(re.findall(r"^(\w+) += (.*)$", server.out, re.MULTILINE))
    expected = {
        "control_socket_disable": "True",
        "http_parser": "python",
        "forwarder_headers": "[]",
        "secure_scheme_headers": "{}",
        "workers": "2",
        "keepalive": "125",
        "graceful_timeout": "25",
        "accesslog": "-",
        "preload_app": "False",
        "reuse_port": "False",
    }
    assert {name: settings[name] for name in expected} == expected
