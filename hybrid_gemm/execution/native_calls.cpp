// Finds what was prepared for a call of `gemm` or `matmul` by how its arrays lie, and starts it:
// one function for Python. native_calls.py makes what is found here. Threads may call it at once
// where Python has no lock, so what it finds it holds a reference to.

#include <cstdint>
#include <initializer_list>

#include "native_python.h"

namespace {

enum : int { A, B, C };
// What the list that Python keeps for a function holds.
enum : int {
    TABLE,
    CONTEXT,       // the address of cuCtxGetCurrent
    OUT_IS_THIRD,  // True where the third argument by position is `out`, and no C is added
    CUPY,
    CUPY_STREAM,
    TENSOR,
    PARAMETER,
    TORCH_STREAM,
    FOLLOWED,  // torch.is_grad_enabled
    WRITTEN,   // tells autograd
    FORWARD,   // torch.autograd.forward_ad
};
// What is found for a key: the structure below, and what Python makes and does. HOWS is what copies
// A as the product reads it, behind it what copies B, or None.
enum : int { PRODUCT, CHECK, MAKE, SHAPE, DTYPE, HOWS };

// The bytes that an array lies in, as `Reach` in arrays/strides.py has them.
struct Reach {
    uint64_t extent, pitch, width;
};

constexpr int BUSY = -1;  // of launch_list.cpp

struct Product {
    int (*start)(void*, uint64_t, uint64_t, uint64_t);
    void* prepared;
    void* context;  // of the GPU that has the arrays
    int64_t ordinal;
    int64_t turned;    // whether it takes B before A
    uint64_t phase;    // of the addresses that it is prepared for
    Reach reaches[3];  // of A, B and C, as they are given
};

// The names of attributes, made once.
struct Names {
    PyObject *out, *shape, *strides, *dtype, *ndim, *size, *whole, *data, *ptr, *device_id, *stride,
        *data_ptr, *get_device, *is_neg, *is_conj, *requires_grad, *is_inference, *copy, *level,
        *is_capturing;
};

const Names& names() {
    static const Names made = [] {
        auto text = PyUnicode_InternFromString;
        return Names{
            text("out"),          text("shape"),     text("strides"),        text("dtype"),
            text("ndim"),         text("size"),      text("_c_contiguous"),  text("data"),
            text("ptr"),          text("device_id"), text("stride"),         text("data_ptr"),
            text("get_device"),   text("is_neg"),    text("is_conj"),        text("requires_grad"),
            text("is_inference"), text("copy_"),     text("_current_level"), text("is_capturing")};
    }();
    return made;
}

// Leaves an error to Python, which meets it again; not one that ends programs, such as Ctrl-C.
void leave_error() {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
}

// A call's arrays: which library's they are, and where they lie.
struct Arrays {
    bool tensors;
    PyObject* of[3];  // A, B and `out`, or None
    PyObject* added;  // C that is another object than `out`, or None
    uint64_t at[3];   // 0 of None
};

// What addresses leave when divided by 16, by which kernels and maps of tensors are chosen.
uint64_t phase_of(const uint64_t* at) {
    return (at[A] & 15) | (at[B] & 15) << 4 | (at[C] & 15) << 8;
}

// Whether an array is of the call's library, and no gradients are followed to it.
bool fits(PyObject* array, bool tensors, PyObject* state) {
    if (!tensors) {
        return has_type(array, PyList_GetItem(state, CUPY));
    }
    if (!has_type(array, PyList_GetItem(state, TENSOR)) &&
        !has_type(array, PyList_GetItem(state, PARAMETER))) {
        return false;
    }
    Ref negated = called(array, names().is_neg);
    Ref conjugated = called(array, names().is_conj);
    Ref followed = attribute(array, names().requires_grad);
    if (!negated || !conjugated || !followed || is_true(negated) || is_true(conjugated)) {
        return false;
    }
    if (is_true(followed)) {
        Ref enabled(PyObject_Vectorcall(PyList_GetItem(state, FOLLOWED), nullptr, 0, nullptr));
        return enabled && !is_true(enabled);
    }
    return true;
}

// Whether tensors may carry derivatives forward: within one of PyTorch's levels for that.
bool goes_forward(PyObject* state) {
    Ref level = attribute(PyList_GetItem(state, FORWARD), names().level);
    return !level || PyLong_AsLongLong(level.get()) >= 0;
}

Ref ordinal_of(PyObject* array, bool tensors) {
    if (tensors) {
        return called(array, names().get_device);
    }
    Ref data = attribute(array, names().data);
    return data ? attribute(data.get(), names().device_id) : Ref();
}

// Whether an array has memory: the storage of a tensor may have been freed.
bool address_of(PyObject* array, bool tensors, uint64_t* address) {
    Ref value;
    if (tensors) {
        value = called(array, names().data_ptr);
    } else if (Ref data = attribute(array, names().data)) {
        value = attribute(data.get(), names().ptr);
    }
    *address = value ? PyLong_AsUnsignedLongLong(value.get()) : 0;
    return value && !PyErr_Occurred() && *address;
}

// How an array lies, put into a key: three things. Making tuples of shape and strides takes longer
// than all else of a call, so a matrix without gaps is known by its rows, its size and its dtype.
bool put(PyObject* key, Py_ssize_t place, PyObject* array, bool tensors) {
    const Names& n = names();
    Ref first, second, dtype = attribute(array, n.dtype);
    if (tensors) {
        first = attribute(array, n.shape);
        second = called(array, n.stride);
    } else {
        Ref whole = attribute(array, n.whole), sides = attribute(array, n.ndim);
        if (!whole || !sides) {
            return false;
        }
        if (is_true(whole) && PyLong_AsLongLong(sides.get()) == 2) {
            first = Ref(PyLong_FromLongLong(PyObject_Size(array)));
            second = attribute(array, n.size);
        } else {
            first = attribute(array, n.shape);
            second = is_true(whole) ? Ref(shared(none)) : attribute(array, n.strides);
        }
    }
    if (!first || !second || !dtype) {
        return false;
    }
    PyTuple_SetItem(key, place, first.take());
    PyTuple_SetItem(key, place + 1, second.take());
    PyTuple_SetItem(key, place + 2, dtype.take());
    return true;
}

// All keywords but `out`, with their types, for True equals 1; None where there are none.
Ref options(PyObject* keywords, Py_ssize_t count) {
    if (!count) {
        return Ref(shared(none));
    }
    Ref made(PyTuple_New(3 * count));
    Py_ssize_t step = 0, place = 0;
    PyObject *name, *value;
    while (made && PyDict_Next(keywords, &step, &name, &value)) {
        if (name == names().out) {
            continue;
        }
        for (PyObject* part : {shared(name), PyObject_Type(value), shared(value)}) {
            if (PyTuple_SetItem(made.get(), place++, part)) {
                return Ref();  // "out" as another object than Python's own
            }
        }
    }
    return made;
}

// The arrays of a call: A and B, and `out`, or C, or both where they are one matrix. False for all
// other calls.
bool read(PyObject* state, PyObject* args, PyObject* keywords, Arrays* arrays) {
    Py_ssize_t count = PyTuple_Size(args);
    if (count != 2 && count != 3) {
        return false;
    }
    PyObject* out = PyDict_GetItemWithError(keywords, names().out);
    PyObject* third = count == 3 ? PyTuple_GetItem(args, 2) : none;
    if (PyList_GetItem(state, OUT_IS_THIRD) == &_Py_TrueStruct) {
        if (out && count == 3) {
            return false;
        }
        out = out ? out : third;
        third = none;
    } else if (third == out) {
        third = none;
    }
    out = out ? out : none;
    arrays->of[A] = PyTuple_GetItem(args, 0);
    arrays->of[B] = PyTuple_GetItem(args, 1);
    arrays->of[C] = out;
    arrays->added = third;
    arrays->tensors = !has_type(arrays->of[A], PyList_GetItem(state, CUPY));
    if (arrays->tensors && goes_forward(state)) {
        return false;
    }
    for (PyObject* array : {arrays->of[A], arrays->of[B], out, third}) {
        if (array != none && !fits(array, arrays->tensors, state)) {
            return false;
        }
    }
    for (int i = A; i <= C; i++) {
        PyObject* array = arrays->of[i];
        arrays->at[i] = 0;
        if (array != none && !address_of(array, arrays->tensors, &arrays->at[i])) {
            return false;
        }
    }
    uint64_t added = arrays->at[C];
    if (third != none && out != none && !address_of(third, arrays->tensors, &added)) {
        return false;
    }
    return added == arrays->at[C];
}

// What calls have in common that one prepared product serves; nothing where there is none.
Ref key_of(PyObject* state, PyObject* args, PyObject* keywords, const Arrays& arrays) {
    Ref ordinal = ordinal_of(arrays.of[A], arrays.tensors);
    if (!ordinal) {
        return Ref();
    }
    PyObject* there = ordinal.get();
    Ref stream(PyObject_Vectorcall(
        PyList_GetItem(state, arrays.tensors ? TORCH_STREAM : CUPY_STREAM), &there, 1, nullptr));
    if (stream && !arrays.tensors) {
        stream = attribute(stream.get(), names().ptr);
    }
    PyObject *out = arrays.of[C], *added = arrays.added;
    bool keyword = PyDict_GetItemWithError(keywords, names().out) != nullptr;
    Ref others = options(keywords, PyDict_Size(keywords) - keyword);
    Ref phase(PyLong_FromLongLong(phase_of(arrays.at)));
    Ref key(PyTuple_New(17));
    if (!stream || !others || !phase || !key) {
        return Ref();
    }
    bool in_place = PyTuple_Size(args) == 3 && PyTuple_GetItem(args, 2) != none &&
                    PyList_GetItem(state, OUT_IS_THIRD) != &_Py_TrueStruct;
    PyTuple_SetItem(key.get(), 0, others.take());
    PyTuple_SetItem(key.get(), 1, ordinal.take());
    PyTuple_SetItem(key.get(), 2, stream.take());
    PyTuple_SetItem(key.get(), 3, shared(in_place ? &_Py_TrueStruct : none));
    PyTuple_SetItem(key.get(), 4, phase.take());
    Py_ssize_t place = 5;
    for (PyObject* array : {arrays.of[A], arrays.of[B], out, added}) {
        if (array == none) {
            for (int i = 0; i < 3; i++) {
                PyTuple_SetItem(key.get(), place + i, shared(none));
            }
        } else if (!put(key.get(), place, array, arrays.tensors)) {
            return Ref();
        }
        place += 3;
    }
    return key;
}

// `Reach.meets` of arrays/strides.py.
bool meet(const Reach& x, uint64_t at, const Reach& other, uint64_t other_at) {
    if (at >= other_at + other.extent || other_at >= at + x.extent) {
        return false;
    }
    const uint64_t pitch = x.pitch ? x.pitch : other.pitch;
    if (!pitch || (other.pitch && other.pitch != pitch)) {
        return true;
    }
    const uint64_t apart =
        at >= other_at ? (at - other_at) % pitch : pitch - (other_at - at) % pitch;
    return apart < other.width || apart + x.width > pitch;
}

bool apart(const Arrays& arrays, const Product& product) {
    const uint64_t* at = arrays.at;
    const Reach* of = product.reaches;
    return !meet(of[A], at[A], of[C], at[C]) && !meet(of[B], at[B], of[C], at[C]);
}

bool is_current(PyObject* state, const Product& product) {
    void* context = nullptr;
    auto current = reinterpret_cast<int (*)(void**)>(
        PyLong_AsUnsignedLongLong(PyList_GetItem(state, CONTEXT)));
    return !current(&context) && context == product.context;
}

bool is_there(PyObject* array, bool tensors, const Product& product) {
    Ref ordinal = ordinal_of(array, tensors);
    return ordinal && PyLong_AsLongLong(ordinal.get()) == product.ordinal;
}

// A new C: make(shape, dtype), or make(A, shape) of tensors.
Ref made(PyObject* found, const Arrays& arrays) {
    PyObject* args[] = {arrays.of[A], PyTuple_GetItem(found, SHAPE), PyTuple_GetItem(found, DTYPE)};
    int first = !arrays.tensors;
    return Ref(PyObject_Vectorcall(PyTuple_GetItem(found, MAKE), args + first, 2, nullptr));
}

// Copies C to where the product is added to it.
bool fill(PyObject* made, PyObject* c, bool tensors) {
    PyObject* args[] = {made, c};
    return tensors ? bool(Ref(PyObject_VectorcallMethod(names().copy, args, 2, nullptr)))
                   : !PyObject_SetItem(made, &_Py_EllipsisObject, c);
}

// Whether what CuPy's current stream of a GPU is given goes to a graph, or that cannot be asked.
bool is_captured(PyObject* state, const Product& product) {
    Ref ordinal(PyLong_FromLongLong(product.ordinal));
    PyObject* there = ordinal.get();
    Ref stream(PyObject_Vectorcall(PyList_GetItem(state, CUPY_STREAM), &there, 1, nullptr));
    Ref answer = stream ? called(stream.get(), names().is_capturing) : Ref();
    return !answer || is_true(answer);
}

// Copies A and B as the product reads them, where it does not read these. Not CuPy's arrays into a
// graph, which would read memory that is another array's by then; PyTorch's graphs keep theirs.
bool copied(PyObject* state, PyObject* found, const Product& product, Arrays* arrays, Ref* copies) {
    for (int i : {A, B}) {
        PyObject* how = PyTuple_GetItem(found, HOWS + i);
        if (how == none) {
            continue;
        }
        if (!arrays->tensors && is_captured(state, product)) {
            return false;
        }
        copies[i] = Ref(PyObject_Vectorcall(how, &arrays->of[i], 1, nullptr));
        if (!copies[i] || !address_of(copies[i].get(), arrays->tensors, &arrays->at[i])) {
            return false;
        }
    }
    return true;
}

// Tells autograd that a tensor was written to.
bool tell(PyObject* state, PyObject* tensor) {
    Ref inference = called(tensor, names().is_inference);
    if (!inference || is_true(inference)) {
        return bool(inference);
    }
    return bool(Ref(PyObject_Vectorcall(PyList_GetItem(state, WRITTEN), &tensor, 1, nullptr)));
}

// C where a product was started; nothing, with an error or without, where it was not.
Ref started(PyObject* state, PyObject* found, Arrays* arrays) {
    const Product& product =
        *reinterpret_cast<const Product*>(PyBytes_AsString(PyTuple_GetItem(found, PRODUCT)));
    bool fresh = arrays->of[C] == none, tensors = arrays->tensors;
    bool added = fresh && arrays->added != none;
    if (!is_current(state, product) || !is_there(arrays->of[B], tensors, product) ||
        !(fresh || is_there(arrays->of[C], tensors, product)) ||
        (added && !is_there(arrays->added, tensors, product))) {
        leave_error();
        return Ref();
    }
    Ref c = fresh ? made(found, *arrays) : Ref(shared(arrays->of[C]));
    if (!c || (fresh && !address_of(c.get(), tensors, &arrays->at[C])) ||
        (added && !fill(c.get(), arrays->added, tensors))) {
        leave_error();
        return Ref();
    }
    if (!apart(*arrays, product)) {
        return Ref();
    }
    Ref copies[2];  // held until the product is started: then this stream alone has their memory
    if (!copied(state, found, product, arrays, copies)) {
        leave_error();
        return Ref();
    }
    const uint64_t* at = arrays->at;
    if (phase_of(at) != product.phase) {
        return Ref();
    }
    const int first = product.turned ? B : A, second = product.turned ? A : B;
    if (int status = product.start(product.prepared, at[first], at[second], at[C])) {
        if (status == BUSY) {
            return Ref();  // Python waits for the other thread
        }
        Ref number(PyLong_FromLongLong(status));
        PyObject* given = number.get();
        Ref raised(PyObject_Vectorcall(PyTuple_GetItem(found, CHECK), &given, 1, nullptr));
        return Ref();
    }
    return tensors && !fresh && !tell(state, c.get()) ? Ref() : static_cast<Ref&&>(c);
}

// start(args, keywords): C, or None where nothing was done.
PyObject* start(PyObject* state, PyObject* const* given, Py_ssize_t) {
    Arrays arrays;
    Ref found;
    if (read(state, given[0], given[1], &arrays)) {
        if (Ref key = key_of(state, given[0], given[1], arrays)) {
            found = Ref(PyObject_GetItem(PyList_GetItem(state, TABLE), key.get()));
        }
    }
    if (!found) {
        leave_error();  // of what cannot be asked or looked up
        return PyErr_Occurred() ? nullptr : shared(none);
    }
    Ref c = started(state, found.get(), &arrays);
    if (c) {
        return c.take();
    }
    return PyErr_Occurred() ? nullptr : shared(none);
}

// key(args, keywords): what `start` looks for, or None.
PyObject* key(PyObject* state, PyObject* const* given, Py_ssize_t) {
    Arrays arrays;
    Ref made;
    if (read(state, given[0], given[1], &arrays)) {
        made = key_of(state, given[0], given[1], arrays);
    }
    leave_error();
    return made ? made.take() : PyErr_Occurred() ? nullptr : shared(none);
}

}  // namespace

// The two functions above for a list as the enumeration says.
extern "C" PyObject* make_start(PyObject* state) {
    static PyMethodDef method = {"start", start, FASTCALL, nullptr};
    return PyCFunction_NewEx(&method, state, nullptr);
}

extern "C" PyObject* make_key(PyObject* state) {
    static PyMethodDef method = {"key", key, FASTCALL, nullptr};
    return PyCFunction_NewEx(&method, state, nullptr);
}
