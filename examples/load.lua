-- Load on ./deeptutor-server with wrk (apt-get install wrk): every request is a prompt of its own.
--   wrk -t 1 -c 16 -d 10s --timeout 60s -s examples/load.lua http://127.0.0.1:8080
-- More at once than --parallel and --queue of the server hold are answered 429, which wrk counts as "Non-2xx".
local n = 0

function request()
    n = n + 1
    local body = string.format('{"prompt": "Number %d: once upon a time", "max_tokens": 16, "temperature": 0}', n)
    return wrk.format("POST", "/v1/completions", {["Content-Type"] = "application/json"}, body)
end
