"""The ceiling: Bottle reads the body and answers a constant. It has the service's settings."""

import bottle

app = bottle.Bottle()


@app.post("/plants")
def create_plant():
    bottle.request.environ["wsgi.input"].read()
    return b'{"name": "Monstera", "tag": "indoor"}'
