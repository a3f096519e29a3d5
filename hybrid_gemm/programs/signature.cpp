// The signature of a call, and the play of a call that has a program: one function for Python.
//
// signature.py says what a signature is, and makes the same one. What is asked of the arrays of a
// call takes Python longer than the driver takes to launch a product. Threads may call this at once
// where Python has no lock, so what it finds it holds a reference to.

#include <cstdint>
#include <initializer_list>

#include "python.h"

namespace {

enum : int { A, B, C, OUT };
enum Library : int { NUMPY, CUPY, TORCH };
// What the list that Python keeps for a table holds; libraries that were not imported are None.
enum : int {
    TABLE,
    MATMUL,   // the function whose third argument by position is `out`
    CONTEXT,  // the address of cuCtxGetCurrent
    CAPTURE,  // that of cuStreamIsCapturing
    NDARRAY,
    CUPY_ARRAY,
    CUPY_STREAM,
    TENSOR,
    PARAMETER,
    TORCH_STREAM,
    FOLLOWED,  // torch.is_grad_enabled
    WRITTEN,   // tells autograd
    FORWARD,   // torch.autograd.forward_ad
};

// The bytes that an array lies in, as `Reach` in arrays/strides.py has them.
struct Reach {
    uint64_t extent, pitch, width, before;
};

// A launch on one stream, of arrays in three slots.
struct Launch {
    int (*start)(void*, uint64_t, uint64_t, uint64_t);
    void* prepared;
    void* context;     // of the GPU that has the arrays
    uint64_t phase;    // of the addresses that it is prepared for
    int64_t slots[3];  // the last is what it makes
};
constexpr int SLOTS = 8;  // of a program whose launches are native

// The names of attributes, made once.
struct Names {
    PyObject *out, *shape, *strides, *dtype, *ndim, *size, *whole, *data, *ptr, *device_id, *stride,
        *data_ptr, *get_device, *is_neg, *is_conj, *requires_grad, *is_inference, *level, *launch,
        *native, *play;
};

const Names& names() {
    static const Names made = [] {
        auto text = PyUnicode_InternFromString;
        return Names{text("out"),           text("shape"),        text("strides"),
                     text("dtype"),         text("ndim"),         text("size"),
                     text("_c_contiguous"), text("data"),         text("ptr"),
                     text("device_id"),     text("stride"),       text("data_ptr"),
                     text("get_device"),    text("is_neg"),       text("is_conj"),
                     text("requires_grad"), text("is_inference"), text("_current_level"),
                     text("launch"),        text("native"),       text("play")};
    }();
    return made;
}

// Leaves an error to Python, which meets it again; not one that ends programs, such as Ctrl-C.
void leave_error() {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
}

// A call's arrays, None where there is none, and where those of GPUs lie. C is None where it is the
// very object that OUT is.
struct Arrays {
    PyObject* of[4];
    Library library[4];
    Ref ordinal[4];  // of its GPU; nothing of the host's
    uint64_t at[4];
    int relation;     // of C to OUT: 0 without a C, 1 the same object, 2 the same address, 3 others
    int first;        // that lies on a GPU; 4 where none does
    uint64_t stream;  // the current one there
};

// Whether a tensor's numbers lie as its strides say, and no derivatives are followed to it.
bool is_plain(PyObject* tensor, PyObject* state) {
    Ref level = attribute(PyList_GetItem(state, FORWARD), names().level);
    Ref negated = called(tensor, names().is_neg);
    Ref conjugated = called(tensor, names().is_conj);
    Ref followed = attribute(tensor, names().requires_grad);
    if (!level || PyLong_AsLongLong(level.get()) >= 0 || !negated || !conjugated || !followed ||
        is_true(negated) || is_true(conjugated)) {
        return false;
    }
    if (is_true(followed)) {
        Ref enabled(PyObject_Vectorcall(PyList_GetItem(state, FOLLOWED), nullptr, 0, nullptr));
        return enabled && !is_true(enabled);
    }
    return true;
}

// Where an array of a GPU lies; false where it has no memory: a tensor's may have been freed.
bool find(PyObject* array, Library library, Ref* ordinal, uint64_t* address) {
    Ref place;
    if (library == TORCH) {
        *ordinal = called(array, names().get_device);
        place = called(array, names().data_ptr);
    } else if (Ref data = attribute(array, names().data)) {
        *ordinal = attribute(data.get(), names().device_id);
        place = attribute(data.get(), names().ptr);
    }
    *address = place ? PyLong_AsUnsignedLongLong(place.get()) : 0;
    return *ordinal && place && !PyErr_Occurred() && *address &&
           PyLong_AsLongLong(ordinal->get()) >= 0;
}

// The arrays of a call; false for calls that have no signature. `given` are the function, its
// arguments and its keywords.
bool read(PyObject* state, PyObject* const* given, Arrays* arrays) {
    PyObject *args = given[1], *keywords = given[2];
    Py_ssize_t count = PyTuple_Size(args);
    if (count != 2 && count != 3) {
        return false;
    }
    PyObject* out = PyDict_GetItemWithError(keywords, names().out);
    PyObject* third = count == 3 ? PyTuple_GetItem(args, 2) : none;
    if (given[0] == PyList_GetItem(state, MATMUL)) {
        if (out && count == 3) {
            return false;
        }
        out = out ? out : third;
        third = none;
    }
    out = out ? out : none;
    arrays->relation = third == none ? 0 : third == out ? 1 : 3;
    arrays->of[A] = PyTuple_GetItem(args, 0);
    arrays->of[B] = PyTuple_GetItem(args, 1);
    arrays->of[C] = third == out ? none : third;
    arrays->of[OUT] = out;
    arrays->first = 4;
    bool tensors = false, others = false;
    for (int i = A; i <= OUT; i++) {
        PyObject* array = arrays->of[i];
        arrays->at[i] = 0;
        if (array == none) {
            continue;
        }
        Ref type(PyObject_Type(array));
        Library library = CUPY;
        if (type.get() == PyList_GetItem(state, NDARRAY)) {
            library = NUMPY;
        } else if (type.get() != PyList_GetItem(state, CUPY_ARRAY)) {
            const bool tensor = type.get() == PyList_GetItem(state, TENSOR) ||
                                type.get() == PyList_GetItem(state, PARAMETER);
            if (!tensor || !is_plain(array, state)) {
                return false;
            }
            library = TORCH;
        }
        arrays->library[i] = library;
        (library == TORCH ? tensors : others) = true;
        if (library != NUMPY) {
            arrays->first = arrays->first == 4 ? i : arrays->first;
            if (!find(array, library, &arrays->ordinal[i], &arrays->at[i])) {
                return false;
            }
        }
    }
    if (arrays->at[C] && arrays->at[C] == arrays->at[OUT]) {
        arrays->relation = 2;
    }
    return !tensors || !others;
}

// How an array lies, put into a signature: four things. Making tuples of shape and strides takes
// longer than all else of a call, so CuPy's matrix without gaps is known by its rows and its size,
// unless it has no row.
bool put(PyObject* key, Py_ssize_t place, Arrays* arrays, int i) {
    const Names& n = names();
    PyObject* array = arrays->of[i];
    Ref first(shared(none)), second(shared(none)), dtype(shared(none));
    Ref ordinal = static_cast<Ref&&>(arrays->ordinal[i]);
    if (array != none) {
        dtype = attribute(array, n.dtype);
        Ref whole, sides;
        Py_ssize_t rows = 0;
        if (arrays->library[i] == CUPY) {
            whole = attribute(array, n.whole), sides = attribute(array, n.ndim);
        }
        if (whole && sides && is_true(whole) && PyLong_AsLongLong(sides.get()) == 2) {
            rows = PyObject_Size(array);
        }
        if (rows) {
            first = Ref(PyLong_FromLongLong(rows));
            second = attribute(array, n.size);
        } else {
            first = attribute(array, n.shape);
            second =
                arrays->library[i] == TORCH ? called(array, n.stride) : attribute(array, n.strides);
        }
    }
    if (!first || !second || !dtype) {
        return false;
    }
    PyTuple_SetItem(key, place, ordinal ? ordinal.take() : shared(none));
    PyTuple_SetItem(key, place + 1, first.take());
    PyTuple_SetItem(key, place + 2, second.take());
    PyTuple_SetItem(key, place + 3, dtype.take());
    return true;
}

// All keywords but `out`, with their types, for True equals 1; None where there are none.
Ref options(PyObject* keywords) {
    Py_ssize_t count = PyDict_Size(keywords);
    if (count && PyDict_GetItemWithError(keywords, names().out)) {
        count--;
    }
    if (!count) {
        return Ref(shared(none));
    }
    Ref made(PyTuple_New(3 * count));
    Py_ssize_t step = 0, place = 0;
    PyObject *name, *value;
    while (made && PyDict_Next(keywords, &step, &name, &value)) {
        if (!PyUnicode_Compare(name, names().out)) {
            continue;
        }
        PyObject* const kind = PyObject_Type(value);
        // As text: what equals may be of other types, and lists and dicts are no keys.
        const bool typed = kind == &PyList_Type || kind == &PyTuple_Type || kind == &PyDict_Type;
        PyObject* const kept = typed ? PyObject_Repr(value) : shared(value);
        for (PyObject* part : {shared(name), kind, kept}) {
            if (!part || PyTuple_SetItem(made.get(), place++, part)) {
                return Ref();
            }
        }
    }
    return made;
}

// What three addresses leave when divided by 16, by which kernels and maps of tensors are chosen.
uint64_t phase_of(uint64_t a, uint64_t b, uint64_t out) {
    return (a & 15) | (b & 15) << 4 | (out & 15) << 8;
}

// The signature of a call, whose arrays lose their ordinals to it.
Ref signature_of(PyObject* state, PyObject* const* given, Arrays* arrays) {
    const uint64_t* at = arrays->at;
    Ref stream(shared(none)), others = options(given[2]), key(PyTuple_New(21));
    if (arrays->first != 4) {  // the current one of the first array's GPU, as its library has it
        const bool tensors = arrays->library[arrays->first] == TORCH;
        PyObject* there = arrays->ordinal[arrays->first].get();
        PyObject* ask = PyList_GetItem(state, tensors ? TORCH_STREAM : CUPY_STREAM);
        stream = Ref(PyObject_Vectorcall(ask, &there, 1, nullptr));
        if (stream && !tensors) {
            stream = attribute(stream.get(), names().ptr);
        }
        arrays->stream = stream ? PyLong_AsUnsignedLongLong(stream.get()) : 0;
    }
    if (!stream || !others || !key) {
        return Ref();
    }
    PyTuple_SetItem(key.get(), 0, shared(given[0]));
    PyTuple_SetItem(key.get(), 1, others.take());
    PyTuple_SetItem(key.get(), 2, PyLong_FromLongLong(arrays->relation));
    PyTuple_SetItem(key.get(), 3, stream.take());
    PyTuple_SetItem(key.get(), 4, PyLong_FromLongLong(phase_of(at[A], at[B], at[OUT])));
    for (int i = A; i <= OUT; i++) {
        if (!put(key.get(), 5 + 4 * i, arrays, i)) {
            return Ref();
        }
    }
    return key;
}

// `Reach.meets` of arrays/strides.py.
bool meet(const Reach& x, uint64_t at, const Reach& other, uint64_t other_at) {
    at -= x.before, other_at -= other.before;
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

// A new array by what makes it.
Ref made(PyObject* make, const Arrays& arrays) {
    const bool tensors = arrays.library[A] == TORCH;
    PyObject* args[] = {arrays.of[A], PyTuple_GetItem(make, 1), PyTuple_GetItem(make, 2)};
    return Ref(PyObject_Vectorcall(PyTuple_GetItem(make, 0), args + !tensors, 2, nullptr));
}

// Whether a graph records what the current stream is given.
bool is_captured(PyObject* state, const Arrays& arrays) {
    auto ask = reinterpret_cast<int (*)(uint64_t, int*)>(
        PyLong_AsUnsignedLongLong(PyList_GetItem(state, CAPTURE)));
    int captured = 0;
    return ask(arrays.stream, &captured) || captured;
}

// Tells autograd that a tensor was written to.
bool tell(PyObject* state, PyObject* tensor) {
    Ref inference = called(tensor, names().is_inference);
    if (!inference || is_true(inference)) {
        return bool(inference);
    }
    return bool(Ref(PyObject_Vectorcall(PyList_GetItem(state, WRITTEN), &tensor, 1, nullptr)));
}

// OUT where a program's launches were started in place of all its commands; nothing, with an error
// or without, where they were not. All but the last write to arrays that nobody has yet, or to an
// OUT that is not read, so that Python may do all again.
Ref launched(PyObject* state, PyObject* program, Arrays* arrays) {
    Ref command = attribute(program, names().launch);
    Ref native =
        command && command.get() != none ? attribute(command.get(), names().native) : Ref();
    if (!native || native.get() == none) {
        return Ref();
    }
    const char* bytes = PyBytes_AsString(PyTuple_GetItem(native.get(), 0));
    const Reach* reaches = reinterpret_cast<const Reach*>(bytes);
    const Launch* launches = reinterpret_cast<const Launch*>(reaches + 4);
    PyObject* makes = PyTuple_GetItem(native.get(), 1);
    void* context = nullptr;
    auto current = reinterpret_cast<int (*)(void**)>(
        PyLong_AsUnsignedLongLong(PyList_GetItem(state, CONTEXT)));
    if (current(&context) || context != launches[0].context) {
        return Ref();
    }
    const bool tensors = arrays->library[A] == TORCH, fresh = arrays->of[OUT] == none;
    uint64_t at[SLOTS] = {arrays->at[A], arrays->at[B], arrays->at[C], arrays->at[OUT]};
    Ref arrays_made[SLOTS];
    for (int i : {A, B, C}) {  // a C that is not read, or is OUT, has no bytes
        const bool looks = !fresh && at[i] && reaches[i].extent;
        if (looks && meet(reaches[i], at[i], reaches[OUT], at[OUT])) {
            return Ref();
        }
    }
    const Py_ssize_t count = PyTuple_Size(makes);
    for (Py_ssize_t i = 0; i < count; i++) {
        const Launch& launch = launches[i];
        const int64_t to = launch.slots[2];
        if (!at[to]) {
            Ref ordinal;
            // CuPy's memory would be another array's when a graph runs; PyTorch's graphs keep it.
            if (to > OUT && !tensors && is_captured(state, *arrays)) {
                return Ref();
            }
            arrays_made[to] = made(PyTuple_GetItem(makes, i), *arrays);
            if (!arrays_made[to] ||
                !find(arrays_made[to].get(), arrays->library[A], &ordinal, &at[to])) {
                return Ref();
            }
        }
        const uint64_t a = at[launch.slots[0]], b = at[launch.slots[1]];
        // Of another status than 0 Python makes an error, or waits for the other thread.
        if (phase_of(a, b, at[to]) != launch.phase || launch.start(launch.prepared, a, b, at[to])) {
            return Ref();
        }
    }
    Ref out = fresh ? static_cast<Ref&&>(arrays_made[OUT]) : Ref(shared(arrays->of[OUT]));
    const bool told = !tensors || fresh || tell(state, out.get());
    return told ? static_cast<Ref&&>(out) : Ref();
}

// play(function, args, keywords): C, or None where there is no program.
PyObject* play(PyObject* state, PyObject* const* given, Py_ssize_t) {
    Arrays arrays;
    Ref program;
    if (read(state, given, &arrays)) {
        if (Ref key = signature_of(state, given, &arrays)) {
            program = Ref(PyObject_GetItem(PyList_GetItem(state, TABLE), key.get()));
        }
    }
    if (!program) {
        leave_error();  // of what cannot be asked or looked up
        return PyErr_Occurred() ? nullptr : shared(none);
    }
    if (Ref out = launched(state, program.get(), &arrays)) {
        return out.take();
    }
    leave_error();
    if (PyErr_Occurred()) {
        return nullptr;
    }
    PyObject* args[] = {program.get(), arrays.of[A], arrays.of[B],
                        arrays.relation == 1 ? arrays.of[OUT] : arrays.of[C], arrays.of[OUT]};
    return PyObject_VectorcallMethod(names().play, args, 5, nullptr);
}

// signature(function, args, keywords): what `play` looks for, or None.
PyObject* signature(PyObject* state, PyObject* const* given, Py_ssize_t) {
    Arrays arrays;
    Ref made;
    if (read(state, given, &arrays)) {
        made = signature_of(state, given, &arrays);
    }
    leave_error();
    return made ? made.take() : PyErr_Occurred() ? nullptr : shared(none);
}

}  // namespace

// The two functions above for a list as the enumeration says.
extern "C" PyObject* make_play(PyObject* state) {
    static PyMethodDef method = {"play", play, FASTCALL, nullptr};
    return PyCFunction_NewEx(&method, state, nullptr);
}

extern "C" PyObject* make_signature(PyObject* state) {
    static PyMethodDef method = {"signature", signature, FASTCALL, nullptr};
    return PyCFunction_NewEx(&method, state, nullptr);
}
