// The functions of Python that signature.cpp calls, and references to Python's objects.
//
// They are declared here and not included, so that Python's headers are not needed: all are of its
// stable ABI, or exported by every version since 3.9.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct PyObject;
typedef intptr_t Py_ssize_t;
typedef PyObject* (*Method)(PyObject*, PyObject* const*, Py_ssize_t);
struct PyMethodDef {
    const char* name;
    Method method;
    int flags;
    const char* doc;
};

extern PyObject _Py_NoneStruct;
extern PyObject _Py_TrueStruct;
extern PyObject PyList_Type, PyTuple_Type, PyDict_Type;
extern PyObject* PyExc_Exception;
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
PyObject* PyObject_Repr(PyObject*);
Py_ssize_t PyObject_Size(PyObject*);
PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, std::size_t, PyObject*);
PyObject* PyObject_VectorcallMethod(PyObject*, PyObject* const*, std::size_t, PyObject*);
PyObject* PyTuple_New(Py_ssize_t);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
PyObject* PyObject_GetItem(PyObject*, PyObject*);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, Py_ssize_t);
PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
int PyDict_Next(PyObject*, Py_ssize_t*, PyObject**, PyObject**);
Py_ssize_t PyDict_Size(PyObject*);
PyObject* PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject*);
unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
char* PyBytes_AsString(PyObject*);
PyObject* PyUnicode_InternFromString(const char*);
int PyUnicode_Compare(PyObject*, PyObject*);
PyObject* PyErr_Occurred();
int PyErr_ExceptionMatches(PyObject*);
void PyErr_Clear();
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);

}  // extern "C"

namespace {

PyObject* const none = &_Py_NoneStruct;
constexpr int FASTCALL = 0x80;  // METH_FASTCALL

// A reference that is given back.
class Ref {
public:
    explicit Ref(PyObject* object = nullptr) : object_(object) {}
    Ref(Ref&& other) : object_(other.take()) {}
    ~Ref() { Py_DecRef(object_); }  // of nothing, too
    Ref& operator=(Ref&& other) {
        Py_DecRef(object_);
        object_ = other.take();
        return *this;
    }
    PyObject* get() const { return object_; }
    PyObject* take() {
        PyObject* object = object_;
        object_ = nullptr;
        return object;
    }
    explicit operator bool() const { return object_ != nullptr; }

private:
    PyObject* object_;
};

PyObject* shared(PyObject* object) {
    Py_IncRef(object);
    return object;
}

Ref attribute(PyObject* object, PyObject* name) { return Ref(PyObject_GetAttr(object, name)); }

Ref called(PyObject* object, PyObject* method) {
    return Ref(PyObject_VectorcallMethod(method, &object, 1, nullptr));
}

// Whether a call gave Python's True.
bool is_true(const Ref& answer) { return answer.get() == &_Py_TrueStruct; }

}  // namespace
