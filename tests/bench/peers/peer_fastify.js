// Fastify and better-sqlite3, as their documentation shows them. Each commit is synced, as in the service.
// https://fastify.dev/docs/latest/ and https://github.com/WiseLibs/better-sqlite3
// peer_fastify.js PORT runs as many processes as WEB_CONCURRENCY says.

const cluster = require("node:cluster");
const Database = require("better-sqlite3");

const id = { type: "integer", minimum: Number.MIN_SAFE_INTEGER, maximum: Number.MAX_SAFE_INTEGER };
const name = { type: "string", pattern: "^[^\\u0000]*$" };
const plant = { type: "object", required: ["name"], properties: { name, tag: name } };
const newPlant = { type: "object", required: ["id", "name"], properties: { id, name, tag: name } };

function serve() {
  const database = new Database(process.env.DATABASE_URL.replace("sqlite:///", ""), { timeout: 10_000 });
  database.pragma("synchronous = FULL");
  const insert = database.prepare("INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING");
  const app = require("fastify")({
    logger: true,
    disableRequestLogging: true, // Fastify's own log has two lines for each request.
    ajv: { customOptions: { coerceTypes: false } },
  });
  app.register(require("@fastify/bearer-auth"), { keys: [process.env.PLANTS_TOKENS] });
  app.addHook("onResponse", async (request, reply) => {
    request.log.info({ req: request, res: reply, responseTime: reply.elapsedTime }, "request completed");
  });
  app.post("/plants", { schema: { body: newPlant, response: { 200: plant } } }, async ({ body }, reply) => {
    const { id, name, tag } = body;
    if (insert.run(id, name, tag ?? null).changes === 0) {
      return reply.code(409).send({ error: 409, message: "there is a plant with this id" });
    }
    return { name, tag };
  });
  app.listen({ host: "127.0.0.1", port: Number(process.argv[2]) });
}

if (cluster.isPrimary) {
  for (let n = 0; n < Number(process.env.WEB_CONCURRENCY); n++) cluster.fork();
} else {
  serve();
}
