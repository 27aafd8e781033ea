"""What else stops the start, and what does not."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.support.server import HERE, PATIENCE, TOKEN, wait_until
from tests.test_start import stops_in_one_line


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--preload", "--preload is not possible, leave it out"),
        ("--certfile=c", "--certfile and --keyfile are not possible, leave them out: a proxy"),
        ("--keyfile=k", "--certfile and --keyfile are not possible, leave them out: a proxy"),
        ("--http-parser=fast", "--http-parser is not possible, leave it out"),
        ("--worker-connections=9", "--worker-connections must be 10 or more, not 9"),
        ("--worker-connections=2000000000", "ulimit -n must be 2000000064 or more"),
    ],
)
def test_an_option_that_would_fail_later_stops_the_start(serve, option, words):
    """In one line, like a setting."""
    stops_in_one_line(serve(option), words)


def test_a_start_in_the_background_that_fails_says_why_in_its_log(serve, tmp_path):
    """As nobody sees its standard error, nor a token that is printed there."""
    log = tmp_path / "error.log"
    serve("--daemon", f"--error-logfile={log}", PLANTS_TOKENS=None)
    words = "[ERROR] --daemon needs PLANTS_TOKENS\n"
    wait_until(lambda: log.exists() and words in log.read_text())


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


def test_nothing_listens_but_the_port_and_no_other_parser_is_used(serve, tmp_path):
    """gunicorn has a control socket unless it is told not to, and takes a parser that is there."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "gunicorn_h1c.py").write_text("open(__file__ + '.used', 'w')")
    paths = dict.fromkeys(("HOME", "XDG_RUNTIME_DIR", "PYTHONPATH"), str(home))
    server = serve(PYTHONDONTWRITEBYTECODE="1", **paths)
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200
    assert [file.name for file in home.iterdir()] == ["gunicorn_h1c.py"]


def test_a_token_that_the_operator_gave_is_never_printed(serve):
    """Whatever the log level is, and however it was given; only one that was made is."""
    server = serve(f"--env=PLANTS_TOKENS={TOKEN}", "--log-level=debug", PLANTS_TOKENS=None)
    assert server.post({"id": 7, "name": "Monstera"})[0] == 200
    assert TOKEN not in server.err + server.out
    assert "curl" not in server.err
