// Fastify and better-sqlite3, as their documentation has them, with the same durability.
//
// https://fastify.dev/docs/latest/ and https://github.com/WiseLibs/better-sqlite3
// peer_fastify.js PORT runs as many processes as WEB_CONCURRENCY says.
"use strict";

const cluster = require("node:cluster");
const Database = require("better-sqlite3");
const Fastify = require("fastify");

const text = { type: "string", pattern: "^[^\\u0000]*$" };
const plant = {
  type: "object",
  required: ["name"],
  properties: { name: text, tag: text },
};
const newPlant = {
  type: "object",
  required: ["id", "name"],
  properties: {
    id: { type: "integer", minimum: Number.MIN_SAFE_INTEGER, maximum: Number.MAX_SAFE_INTEGER },
    ...plant.properties,
  },
};

function connect() {
  const path = process.env.DATABASE_URL.replace("sqlite:///", "");
  const database = new Database(path, { timeout: 10_000 });
  database.pragma("journal_mode = WAL");
  database.pragma("synchronous = FULL");
  database.exec(
    "CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT",
  );
  return database;
}

function createApp(database) {
  const app = Fastify({
    logger: true,
    disableRequestLogging: true, // it would be two lines a request
    ajv: { customOptions: { coerceTypes: false } },
  });
  const insert = database.prepare("INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING");
  const select = database.prepare("SELECT name, tag FROM plants WHERE id = ?");
  app.register(require("@fastify/bearer-auth"), { keys: [process.env.PLANTS_TOKENS] });
  app.removeContentTypeParser("text/plain");
  app.addHook("onResponse", async (request, reply) => {
    request.log.info({ req: request, res: reply, responseTime: reply.elapsedTime }, "request completed");
  });
  app.post("/plants", { schema: { body: newPlant, response: { 200: plant } } }, async (request, reply) => {
    const { id, name, tag } = request.body;
    if (insert.run(id, name, tag ?? null).changes === 0) {
      const stored = select.get(id);
      if (stored.name !== name || stored.tag !== (tag ?? null)) {
        return reply.code(409).send({ error: 409, message: `there is another plant ${id}` });
      }
    }
    return { name, tag };
  });
  return app;
}

if (cluster.isPrimary) {
  connect().close(); // the table is made before there are several who would make it
  for (let n = 0; n < Number(process.env.WEB_CONCURRENCY); n++) cluster.fork();
} else {
  createApp(connect()).listen({ host: "127.0.0.1", port: Number(process.argv[2]) });
}
