// The few functions of CPython's stable ABI (PEP 384, PEP 652) that door.cpp calls, declared by hand.
//
// Python.h comes with a package of its own that servers often lack, while the interpreter always exports these symbols,
// with these signatures, from 3.11 on (Doc/data/stable_abi.dat of CPython). Objects stay opaque; no macro, no structure
// but Py_buffer and PyMethodDef, whose layouts are part of the ABI (PyMethodDef always was, Py_buffer is since 3.11).
#pragma once

#include <cstddef>

extern "C" {

struct PyObject;
using Py_ssize_t = std::ptrdiff_t;

struct Py_buffer {
    void* buf;
    PyObject* obj;
    Py_ssize_t len, itemsize;
    int readonly, ndim;
    char* format;
    Py_ssize_t *shape, *strides, *suboffsets;
    void* internal;
};

using PyCFunction = PyObject* (*)(PyObject* self, PyObject* argument);

struct PyMethodDef {
    const char* name;
    PyCFunction method;
    int flags;
    const char* doc;
};

extern PyObject _Py_NoneStruct;
extern PyObject* PyExc_TypeError;
extern PyObject* PyExc_ValueError;

void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
int PyObject_GetBuffer(PyObject*, Py_buffer*, int flags);
void PyBuffer_Release(Py_buffer*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyType_GenericAlloc(PyObject* type, Py_ssize_t);
PyObject* PyBool_FromLong(long);
PyObject* PyBytes_FromStringAndSize(const char*, Py_ssize_t);
PyObject* PyFloat_FromDouble(double);
PyObject* PyLong_FromUnsignedLongLong(unsigned long long);
PyObject* PyList_New(Py_ssize_t);
int PyList_SetItem(PyObject* list, Py_ssize_t, PyObject* stolen);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);  // borrowed
PyObject* PySequence_GetSlice(PyObject*, Py_ssize_t begin, Py_ssize_t end);
PyObject* PyCapsule_New(void*, const char* name, void (*destructor)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char* name);
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
char* PyBytes_AsString(PyObject*);
int PyBytes_AsStringAndSize(PyObject*, char**, Py_ssize_t*);
double PyFloat_AsDouble(PyObject*);
long PyLong_AsLong(PyObject*);
unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
PyObject* PyErr_NoMemory();
PyObject* PyErr_Occurred();
void PyErr_SetString(PyObject* kind, const char*);

}  // extern "C"

constexpr int kPyBUF_SIMPLE = 0;  // PyBUF_SIMPLE
constexpr int kMETH_O = 0x0008;   // METH_O
constexpr int kMETH_FASTCALL = 0x0080;  // METH_FASTCALL, without keywords
