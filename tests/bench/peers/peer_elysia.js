// Elysia on Bun with bun:sqlite, as their documentation shows them. Each commit is synced, as in the service.
// https://elysiajs.com/patterns/deploy, https://elysiajs.com/plugins/bearer and https://bun.com/docs/runtime/sqlite
// peer_elysia.js PORT runs as many processes as WEB_CONCURRENCY says; they share the port (SO_REUSEPORT).

import { Database } from "bun:sqlite";
import cluster from "node:cluster";
import { bearer } from "@elysiajs/bearer";
import { Elysia, t } from "elysia";

const id = t.Number({ multipleOf: 1, minimum: Number.MIN_SAFE_INTEGER, maximum: Number.MAX_SAFE_INTEGER });
const text = t.String({ pattern: "^[^\\u0000]*$" });
const plant = t.Object({ name: text, tag: t.Optional(text) });
const newPlant = t.Object({ id, name: text, tag: t.Optional(text) });
const problem = t.Object({ error: t.Integer(), message: t.String() });

function serve() {
  const database = new Database(process.env.DATABASE_URL.replace("sqlite:///", ""), { strict: true });
  database.run("PRAGMA busy_timeout = 10000");
  database.run("PRAGMA synchronous = FULL");
  const insert = database.query("INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING");
  new Elysia()
    .use(bearer())
    .derive(() => ({ start: performance.now() }))
    .onAfterResponse(({ request, path, set, start }) => {
      const seconds = (performance.now() - start) / 1000;
      console.log(JSON.stringify({ time: Date.now(), method: request.method, path, status: set.status, seconds }));
    })
    .post(
      "/plants",
      ({ body: { id, name, tag }, status }) => {
        if (insert.run(id, name, tag ?? null).changes === 0) {
          return status(409, { error: 409, message: "there is a plant with this id" });
        }
        return { name, tag };
      },
      {
        body: newPlant,
        response: { 200: plant, 401: problem, 409: problem },
        beforeHandle({ bearer, set, status }) {
          if (bearer !== process.env.PLANTS_TOKENS) {
            set.headers["WWW-Authenticate"] = "Bearer realm='plants'";
            return status(401, { error: 401, message: "the token is missing or wrong" });
          }
        },
      },
    )
    .listen({ hostname: "127.0.0.1", port: Number(process.argv[2]) });
}

if (cluster.isPrimary) {
  for (let n = 0; n < Number(process.env.WEB_CONCURRENCY); n++) cluster.fork();
} else {
  serve();
}
