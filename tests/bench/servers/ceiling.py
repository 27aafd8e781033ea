"""The ceiling: Bottle reads the body and answers a constant. It has the service's settings."""

from bottle import Bottle, request, response

app = Bottle()


@app.post("/plants")
def create_plant() -> bytes:
    """POST /plants."""
    request.environ["wsgi.input"].read()
    response.content_type = "application/json"
    return b'{"name": "Monstera", "tag": "indoor"}'
