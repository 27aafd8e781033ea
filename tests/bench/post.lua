-- Posts a new plant with each request; prints the counts and latencies as JSON at the end.
-- wrk -s post.lua URL -- TOKEN
local number_of_threads = 0

function setup(thread)
  thread:set("thread_number", number_of_threads)
  number_of_threads = number_of_threads + 1
end

function init(args)
  wrk.method = "POST"
  wrk.headers["Authorization"] = "Bearer " .. args[1]
  wrk.headers["Content-Type"] = "application/json"
  next_id = thread_number * 100000000
end

function request()
  next_id = next_id + 1
  return wrk.format(nil, "/plants", nil,
    string.format('{"id": %.0f, "name": "Monstera", "tag": "indoor"}', next_id))
end

function done(summary, latency, requests)
  local errors = summary.errors
  print(string.format('{"responses": %d, "refused": %d, "broken": %d, "seconds": %f, "p50": %f, "p99": %f}',
    summary.requests, errors.status, errors.read + errors.write + errors.timeout,
    summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
