// The door from Python to request.hpp and frame.hpp: hands out builtin functions, since a call through ctypes costs more
// than what they do.
//
// A Request is made as its type's own allocator makes it, and its values are put where Python puts them: the word of
// each slot is looked up in a sample that Python made. The way through the slots' descriptors would take 0.2 us of 0.65.
// The caller holds the interpreter's lock.
#include <algorithm>
#include <cstdlib>

#include "cpython.hpp"
#include "frame.hpp"
#include "request.hpp"

namespace {

constexpr Py_ssize_t kSlots = 20;  // of messages.Request; library.py compares their names

struct Maker {
    zl::wire::Limits limits;
    PyObject* type;
    Py_ssize_t words[kSlots];  // where each slot lies in an object, counted in words
};

PyObject* bytes_of(zl::wire::Bytes field) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(field.data), static_cast<Py_ssize_t>(field.size));
}

// Makes the objects of prompt fields: bytes of text, and views of the payload where they are packed token ids, which
// nobody but the program needs to read.
struct Contents {
    PyObject* payload;
    const uint8_t* begin;
    bool views;

    PyObject* operator()(zl::wire::Bytes field) const {
        if (!views) return bytes_of(field);
        const Py_ssize_t at = field.data ? field.data - begin : 0;
        return PySequence_GetSlice(payload, at, at + static_cast<Py_ssize_t>(field.size));
    }
};

template <class Make>
PyObject* list_of(const zl::wire::Bytes* fields, uint32_t n, Make&& make) {
    PyObject* list = PyList_New(n);
    for (uint32_t i = 0; list && i < n; ++i) {
        PyObject* item = make(fields[i]);
        if (!item || PyList_SetItem(list, i, item)) {
            Py_DecRef(list);
            return nullptr;
        }
    }
    return list;
}

PyObject* none() {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

PyObject* micro(bool present, uint32_t value) { return present ? PyFloat_FromDouble(value / 1e6) : none(); }

// Fills the slots of a new Request one after another; after a failure it takes no more and gives nullptr.
class Filler {
  public:
    explicit Filler(const Maker& maker) : maker_(maker), request_(PyType_GenericAlloc(maker.type, 0)) {}

    Filler& operator<<(PyObject* value) {
        if (value && request_) {
            reinterpret_cast<PyObject**>(request_)[maker_.words[at_++]] = value;
        } else {
            if (value) Py_DecRef(value);
            if (request_) Py_DecRef(request_);
            request_ = nullptr;
        }
        return *this;
    }

    Filler& operator<<(uint64_t value) { return *this << PyLong_FromUnsignedLongLong(value); }

    PyObject* request() const { return request_; }

  private:
    const Maker& maker_;
    PyObject* request_;
    Py_ssize_t at_ = 0;
};

PyObject* decode(PyObject* self, PyObject* payload) {
    const auto* maker = static_cast<const Maker*>(PyCapsule_GetPointer(self, nullptr));
    Py_buffer view;
    if (!maker || PyObject_GetBuffer(payload, &view, kPyBUF_SIMPLE)) return nullptr;
    zl::wire::Request found;
    PyObject* request;
    if (zl::wire::read(static_cast<const uint8_t*>(view.buf), static_cast<size_t>(view.len), maker->limits, found)) {
        Filler fill(*maker);
        const Contents content{payload, static_cast<const uint8_t*>(view.buf), found.encoding == zl::wire::kTokens};
        fill << found.request_id << uint64_t{0} << uint64_t{found.encoding} << content(found.system)
             << list_of(found.turns, found.n_turns, content) << content(found.context)
             << micro(found.has_temperature, found.temperature) << micro(found.has_top_p, found.top_p)
             << micro(found.has_penalty, found.penalty) << uint64_t{found.max_tokens} << uint64_t{found.type}
             << (found.has_seed ? PyLong_FromUnsignedLongLong(found.seed) : none())
             << list_of(found.stops, found.n_stops, bytes_of) << uint64_t{found.deadline_ms} << PyBool_FromLong(found.ignore_eos)
             << PyBool_FromLong(found.logprobs) << bytes_of(found.auth_token) << uint64_t{0} << uint64_t{0} << none();
        request = fill.request();
    } else {
        request = none();
    }
    PyBuffer_Release(&view);
    return request;
}

void free_maker(PyObject* capsule) {
    auto* maker = static_cast<Maker*>(PyCapsule_GetPointer(capsule, nullptr));
    Py_DecRef(maker->type);
    std::free(maker);
}

PyMethodDef decode_def = {
    "decode_valid", decode, kMETH_O,
    "Take a payload (any contiguous buffer); return the Request that it surely is, checked, or None: not sure. "
    "Packed token ids are slices of the payload: of a memoryview, views."};

PyObject* encode(PyObject*, PyObject* const* arguments, Py_ssize_t n) {
    if (n != 5) {
        PyErr_SetString(PyExc_TypeError, "encode_token takes request_id, token_id, text, logprob, seed");
        return nullptr;
    }
    const auto given = [arguments](int i) { return arguments[i] != &_Py_NoneStruct; };
    zl::wire::Token token{};
    char* text;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(arguments[2], &text, &size)) return nullptr;
    token.text = {reinterpret_cast<const uint8_t*>(text), static_cast<size_t>(size)};
    const long id = PyLong_AsLong(arguments[1]);
    token.id = static_cast<int32_t>(id);
    token.request_id = PyLong_AsUnsignedLongLong(arguments[0]);
    token.has_logprob = given(3);
    if (token.has_logprob) token.logprob = static_cast<float>(PyFloat_AsDouble(arguments[3]));
    if (given(4)) token.seed = PyLong_AsUnsignedLongLong(arguments[4]);
    if (PyErr_Occurred()) return nullptr;
    const zl::wire::TokenFrame frame(token);
    if (id != token.id || frame.size() > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "encode_token: a token id of more than 32 bits, or a text that fits no frame");
        return nullptr;
    }
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(frame.size()));
    if (made) frame.write(reinterpret_cast<uint8_t*>(PyBytes_AsString(made)));
    return made;
}

PyMethodDef encode_def = {
    "encode_token", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(encode)), kMETH_FASTCALL,
    "Take request_id, token_id, text, logprob or None, seed or None; return the frame."};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* zl_token_encoder() {
    return PyCFunction_NewEx(&encode_def, nullptr, nullptr);
}

// Make the decoder of Requests like `sample`, an object of n_words words whose slots hold the objects of the tuple
// `values` in order, each of them once. None: the words of the slots cannot be told; NULL: an exception is set.
extern "C" __attribute__((visibility("default"))) PyObject* zl_decoder(PyObject* sample, Py_ssize_t n_words,
                                                                       PyObject* values,
                                                                       const zl::wire::Limits* limits) {
    if (PyTuple_Size(values) != kSlots) return none();
    auto* maker = static_cast<Maker*>(std::calloc(1, sizeof(Maker)));
    if (!maker) return PyErr_NoMemory();
    maker->limits = *limits;
    maker->type = PyObject_Type(sample);
    PyObject* capsule = PyCapsule_New(maker, nullptr, free_maker);
    if (!capsule) return nullptr;
    auto* const words = reinterpret_cast<PyObject**>(sample);
    for (Py_ssize_t slot = 0; slot < kSlots; ++slot) {
        PyObject* const value = PyTuple_GetItem(values, slot);
        PyObject** const found = std::find(words, words + n_words, value);
        if (found == words + n_words || std::find(found + 1, words + n_words, value) != words + n_words) {
            Py_DecRef(capsule);
            return none();
        }
        maker->words[slot] = found - words;
    }
    PyObject* function = PyCFunction_NewEx(&decode_def, capsule, nullptr);
    Py_DecRef(capsule);
    return function;
}
