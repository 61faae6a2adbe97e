-- Wireshark dissector of the zl protocol: frames, requests, answers, with field names; TCP port 7433.
--
-- Install: copy this file to the personal plugins folder (wireshark -v names it), or give it on the command line:
--   tshark -X lua_script:tools/wireshark/zl.lua -r capture.pcap -O zl
-- Another port: "Decode As…", or tshark -d tcp.port==9000,zl
-- Filters: zl.request.request_id == 7, zl.response.error.code, zl.ping, zl.wrong

local zl = Proto("zl", "zl inference protocol")

local HEADER = 4
local PORT = 7433
local MAX_PLAUSIBLE = 16 * 1024 * 1024  -- longer frames are no frames: stop asking TCP for more

local types = {[0] = "CHAT", [1] = "SUMMARIZE", [2] = "CREATIVE"}
local operations = {[0] = "GENERATE", [1] = "CANCEL", [2] = "HELLO"}
local encodings = {[0] = "TEXT", [1] = "TOKENS"}
local finishes = {[0] = "NONE", [1] = "STOP", [2] = "LENGTH", [3] = "CANCELLED", [4] = "ERROR"}
local codes = {
  [0] = "OK", [1] = "BAD_FRAME", [2] = "BAD_REQUEST", [3] = "LIMIT_EXCEEDED", [4] = "UNAUTHENTICATED",
  [5] = "OVERLOADED", [6] = "DEADLINE_EXCEEDED", [7] = "DRAINING", [8] = "INTERNAL", [9] = "NUMERIC",
  [10] = "DUPLICATE_ID",
}

-- A message: number -> {name, kind, enum or message}. Kinds: bytes, varint, bool, micro (fixed32, times a million),
-- fixed64, enum, message, and packed_int32 and packed_float.
local error_fields = {[1] = {"code", "enum", codes}, [2] = {"message", "bytes"}, [3] = {"retry_after_ms", "varint"}}
local usage_fields = {
  [1] = {"prompt_tokens", "varint"}, [2] = {"completion_tokens", "varint"}, [3] = {"constant_tokens", "varint"},
  [4] = {"truncated", "bool"}, [5] = {"queue_us", "varint"}, [6] = {"prefill_us", "varint"},
  [7] = {"decode_us", "varint"}, [8] = {"glue_us", "varint"},
}
local server_fields = {
  [1] = {"version", "bytes"}, [2] = {"model", "bytes"}, [3] = {"tokenizer_sha256", "bytes"},
  [4] = {"vocab_size", "varint"}, [5] = {"max_batch", "varint"}, [6] = {"max_model_len", "varint"},
  [7] = {"max_tokens", "varint"}, [8] = {"max_messages", "varint"}, [9] = {"max_frame", "varint"},
  [10] = {"device", "bytes"}, [11] = {"build_id", "bytes"},
}
local request_fields = {
  [1] = {"system_prompt", "bytes"}, [2] = {"messages", "bytes"}, [3] = {"temperature", "micro"},
  [4] = {"top_p", "micro"}, [5] = {"repetition_penalty", "micro"}, [6] = {"max_tokens", "varint"},
  [7] = {"type", "enum", types}, [8] = {"request_id", "varint"}, [9] = {"operation", "enum", operations},
  [10] = {"encoding", "enum", encodings}, [11] = {"seed", "fixed64"}, [12] = {"stop", "bytes"},
  [13] = {"context", "bytes"}, [14] = {"auth_token", "bytes"}, [15] = {"deadline_ms", "varint"},
  [16] = {"ignore_eos", "bool"}, [17] = {"logprobs", "bool"},
}
local response_fields = {
  [1] = {"token_ids", "packed_int32"}, [2] = {"logprobs", "packed_float"}, [3] = {"is_finished", "bool"},
  [4] = {"request_id", "varint"}, [5] = {"text", "bytes"}, [6] = {"finish_reason", "enum", finishes},
  [7] = {"error", "message", error_fields}, [8] = {"usage", "message", usage_fields},
  [9] = {"server", "message", server_fields}, [10] = {"seed", "varint"},
}

local f_length = ProtoField.uint32("zl.length", "Payload length", base.DEC)
local f_ping = ProtoField.bool("zl.ping", "Ping")
local f_unknown = ProtoField.bytes("zl.unknown", "Unknown field")
local f_wrong = ProtoField.string("zl.wrong", "Wrong")
local all = {f_length, f_ping, f_unknown, f_wrong}

local wire_of = {
  bytes = 2, varint = 0, bool = 0, micro = 5, fixed64 = 1, enum = 0, message = 2, packed_int32 = 2, packed_float = 2,
}

-- Make the ProtoFields of a message and its submessages; entry[4] is the field.
local function declare(prefix, fields)
  for _, entry in pairs(fields) do
    local name, kind, more = entry[1], entry[2], entry[3]
    local abbr = prefix .. "." .. name
    if kind == "bytes" then
      entry[4] = ProtoField.string(abbr, name)
    elseif kind == "varint" or kind == "fixed64" then
      entry[4] = ProtoField.uint64(abbr, name, base.DEC)
    elseif kind == "bool" then
      entry[4] = ProtoField.bool(abbr, name)
    elseif kind == "enum" then
      entry[4] = ProtoField.uint32(abbr, name, base.DEC, more)
    elseif kind == "micro" then
      entry[4] = ProtoField.double(abbr, name)
    else
      entry[4] = ProtoField.string(abbr, name)
    end
    all[#all + 1] = entry[4]
    if kind == "message" then declare(abbr, more) end
  end
end

declare("zl.request", request_fields)
declare("zl.response", response_fields)
zl.fields = all

-- Read a varint at `at` before `stop`; return UInt64 and the offset after it, or nothing.
local function varint(tvb, at, stop)
  local value, shift = UInt64(0), 0
  for i = 0, 9 do
    if at + i >= stop then return nil end
    local byte = tvb(at + i, 1):uint()
    value = value + UInt64(byte % 128):lshift(shift)
    shift = shift + 7
    if byte < 128 then return value, at + i + 1 end
  end
  return nil
end

local function wrong(tree, tvb, at, stop, text)
  local item = tree:add(f_wrong, tvb(at, math.max(0, stop - at)), text)
  item:add_expert_info(PI_MALFORMED, PI_ERROR, text)
  return false
end

local function packed(tvb, at, stop, kind)
  local out = {}
  while at < stop do
    if kind == "packed_float" then
      if stop - at < 4 then return nil end
      out[#out + 1] = string.format("%.6g", tvb(at, 4):le_float())
      at = at + 4
    else
      local value
      value, at = varint(tvb, at, stop)
      if not value then return nil end
      out[#out + 1] = tostring(value)
    end
  end
  return "[" .. table.concat(out, ", ") .. "]"
end

-- Explain the fields in [at, stop) under `tree`; `seen` collects what the summary shows. False: it is no message.
local function message(tvb, at, stop, tree, fields, seen)
  while at < stop do
    local start = at
    local tag
    tag, at = varint(tvb, at, stop)
    if not tag then return wrong(tree, tvb, start, stop, "a tag that does not end") end
    local number, wire = tag:rshift(3):tonumber(), tag:band(7):tonumber()
    if number == 0 or wire == 3 or wire == 4 or wire > 5 then
      return wrong(tree, tvb, start, stop, "no field: number " .. number .. ", wire type " .. wire)
    end
    local value, content
    if wire == 0 then
      value, at = varint(tvb, at, stop)
      if not value then return wrong(tree, tvb, start, stop, "a value that does not end") end
    else
      local size = wire == 5 and 4 or 8
      if wire == 2 then
        value, at = varint(tvb, at, stop)
        if not value then return wrong(tree, tvb, start, stop, "a length that does not end") end
        size = value:tonumber()
      end
      if size > stop - at then
        return wrong(tree, tvb, start, stop, "length " .. size .. ", but " .. (stop - at) .. " bytes are left")
      end
      content = at
      at = at + size
    end
    local entry = fields[number]
    local range = tvb(start, at - start)
    if not entry or wire_of[entry[2]] ~= wire then
      tree:add(f_unknown, range)
    else
      local name, kind, more, field = entry[1], entry[2], entry[3], entry[4]
      if kind == "message" then
        local inner = tree:add(field, range, "")
        inner:set_text(name)
        local found = {}
        if not message(tvb, content, at, inner, more, found) then return false end
        seen[name] = found
      elseif kind == "bytes" then
        local text = at > content and tvb(content, at - content):string(ENC_UTF_8) or ""
        tree:add(field, range, text)
        seen[name] = text
      elseif kind == "micro" then
        tree:add(field, range, tvb(content, 4):le_uint() / 1000000)
      elseif kind == "fixed64" then
        tree:add(field, range, tvb(content, 8):le_uint64())
      elseif kind == "bool" then
        tree:add(field, range, value ~= UInt64(0))
        seen[name] = value ~= UInt64(0)
      elseif kind == "enum" then
        local plain = value:lower()
        tree:add(field, range, plain)
        seen[name] = more[plain] or tostring(plain)
      elseif kind == "varint" then
        tree:add(field, range, value)
        seen[name] = tostring(value)
      else
        local text = packed(tvb, content, at, kind)
        if not text then return wrong(tree, tvb, start, stop, "a packed value that does not end") end
        tree:add(field, range, text)
      end
    end
  end
  return true
end

local function summary(seen, is_request)
  local id = seen.request_id or "0"
  if is_request then return (seen.operation or "GENERATE") .. " " .. id end
  if seen.error then return "error " .. (seen.error.code or "OK") .. " " .. id end
  if seen.server then return "server info " .. id end
  if seen.is_finished then return "end " .. id .. " " .. (seen.finish_reason or "") end
  return "tokens " .. id
end

local function dissect_frame(tvb, pinfo, tree)
  -- match_uint is the port by which TCP found us, the listening one.
  local is_request = pinfo.dst_port == pinfo.match_uint
  local stop = tvb:len()
  local item = tree:add(zl, tvb())
  item:add(f_length, tvb(0, HEADER))
  local text
  if stop == HEADER then
    item:add(f_ping, tvb(0, HEADER), true)
    text = "ping"
  else
    local seen = {}
    local branch = item:add(tvb(HEADER, stop - HEADER), is_request and "Request" or "Response")
    local fine = message(tvb, HEADER, stop, branch, is_request and request_fields or response_fields, seen)
    text = fine and summary(seen, is_request) or "malformed"
  end
  item:append_text(": " .. text)
  pinfo.cols.info:append(text .. "; ")
  return stop
end

local function frame_length(tvb, _, offset)
  local length = tvb(offset, HEADER):uint()
  -- What cannot be a frame is shown as one that takes what is there, and is malformed.
  if length > MAX_PLAUSIBLE then return tvb:len() - offset end
  return HEADER + length
end

function zl.dissector(tvb, pinfo, tree)
  pinfo.cols.protocol = "ZL"
  pinfo.cols.info = ""
  dissect_tcp_pdus(tvb, tree, HEADER, frame_length, dissect_frame)
  return tvb:len()
end

DissectorTable.get("tcp.port"):add(PORT, zl)
