// The runtime over PJRT's C API; no other file knows this interface.
//
// https://github.com/openxla/xla/blob/main/xla/pjrt/c/pjrt_c_api.h
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

#include "jaxrec/serving/error.h"
#include "jaxrec/serving/runtime.h"
#include "library.h"
#include "native_library.h"
#include "xla/pjrt/c/pjrt_c_api.h"
#include "xla/pjrt/c/pjrt_c_api_ffi_extension.h"

namespace jaxrec::serving {
namespace {

// The structures of the C API begin with their size, and what is not set is zero.
#define JAXREC_PJRT_ARGS(type, name) \
  type name{};                       \
  name.struct_size = type##_STRUCT_SIZE

// CompileOptionsProto, serialized: executable_build_options (field 3) with num_replicas (4) and
// num_partitions (5) of 1.
constexpr char kCompileOptions[] = {0x1a, 4, 0x20, 1, 0x28, 1};

// The platform's name that XLA registers functions of CPUs under.
constexpr std::string_view kPlatform = "Host";

PJRT_Buffer_Type type_of(DType dtype) {
  switch (dtype) {
    case DType::kBool: return PJRT_Buffer_Type_PRED;
    case DType::kInt8: return PJRT_Buffer_Type_S8;
    case DType::kInt16: return PJRT_Buffer_Type_S16;
    case DType::kInt32: return PJRT_Buffer_Type_S32;
    case DType::kInt64: return PJRT_Buffer_Type_S64;
    case DType::kUInt8: return PJRT_Buffer_Type_U8;
    case DType::kUInt16: return PJRT_Buffer_Type_U16;
    case DType::kUInt32: return PJRT_Buffer_Type_U32;
    case DType::kUInt64: return PJRT_Buffer_Type_U64;
    case DType::kFloat16: return PJRT_Buffer_Type_F16;
    case DType::kBFloat16: return PJRT_Buffer_Type_BF16;
    case DType::kFloat32: return PJRT_Buffer_Type_F32;
    case DType::kFloat64: return PJRT_Buffer_Type_F64;
    case DType::kFloat8E4M3FN: return PJRT_Buffer_Type_F8E4M3FN;
    case DType::kFloat8E5M2: return PJRT_Buffer_Type_F8E5M2;
  }
  return PJRT_Buffer_Type_INVALID;
}

size_t bytes_of(DType dtype, const std::vector<int64_t>& shape) {
  size_t bytes = size_of(dtype);
  for (const int64_t size : shape) bytes *= static_cast<size_t>(size);
  return bytes;
}

// The plugin's functions.
class Api {
 public:
  explicit Api(const std::string& path) {
    using GetPjrtApi = const PJRT_Api*();
    auto* get = reinterpret_cast<GetPjrtApi*>(::dlsym(load_library(path), "GetPjrtApi"));
    if (get == nullptr) throw ArtifactError(path + " is no PJRT plugin: it lacks GetPjrtApi");
    api_ = get();
    const PJRT_Api_Version& version = api_->pjrt_api_version;
    if (version.major_version != PJRT_API_MAJOR) {
      throw ArtifactError(path + " has version " + std::to_string(version.major_version) +
                          " of PJRT's interface, and this program was built for " +
                          std::to_string(PJRT_API_MAJOR));
    }
    JAXREC_PJRT_ARGS(PJRT_Plugin_Initialize_Args, args);
    check(api_->PJRT_Plugin_Initialize(&args));
  }

  const PJRT_Api* operator->() const { return api_; }

  // Throws what the plugin says about an error.
  void check(PJRT_Error* error) const {
    if (error == nullptr) return;
    JAXREC_PJRT_ARGS(PJRT_Error_Message_Args, args);
    args.error = error;
    api_->PJRT_Error_Message(&args);
    const std::string message(args.message, args.message_size);
    JAXREC_PJRT_ARGS(PJRT_Error_Destroy_Args, destroy);
    destroy.error = error;
    api_->PJRT_Error_Destroy(&destroy);
    throw ArtifactError(message);
  }

  // Waits for an event and destroys it.
  void await(PJRT_Event* event) const {
    JAXREC_PJRT_ARGS(PJRT_Event_Await_Args, args);
    args.event = event;
    PJRT_Error* error = api_->PJRT_Event_Await(&args);
    destroy(event);
    check(error);
  }

  void destroy(PJRT_Event* event) const {
    JAXREC_PJRT_ARGS(PJRT_Event_Destroy_Args, args);
    args.event = event;
    ignore(api_->PJRT_Event_Destroy(&args));
  }

  void destroy(PJRT_Buffer* buffer) const {
    JAXREC_PJRT_ARGS(PJRT_Buffer_Destroy_Args, args);
    args.buffer = buffer;
    ignore(api_->PJRT_Buffer_Destroy(&args));
  }

  // An error of a destructor changes nothing.
  void ignore(PJRT_Error* error) const {
    if (error == nullptr) return;
    JAXREC_PJRT_ARGS(PJRT_Error_Destroy_Args, args);
    args.error = error;
    api_->PJRT_Error_Destroy(&args);
  }

 private:
  const PJRT_Api* api_;
};

struct Client {
  Api api;
  PJRT_Client* client = nullptr;
  PJRT_Device* device = nullptr;

  explicit Client(const std::string& plugin) : api(plugin) {
    // Programs run on the thread that calls them: a switch of threads costs more than a small batch.
    constexpr std::string_view option = "asynchronous";
    JAXREC_PJRT_ARGS(PJRT_NamedValue, asynchronous);
    asynchronous.name = option.data();
    asynchronous.name_size = option.size();
    asynchronous.type = PJRT_NamedValue_kBool;
    asynchronous.bool_value = false;
    asynchronous.value_size = 1;
    JAXREC_PJRT_ARGS(PJRT_Client_Create_Args, args);
    args.create_options = &asynchronous;
    args.num_options = 1;
    api.check(api->PJRT_Client_Create(&args));
    client = args.client;
    JAXREC_PJRT_ARGS(PJRT_Client_AddressableDevices_Args, devices);
    devices.client = client;
    api.check(api->PJRT_Client_AddressableDevices(&devices));
    if (devices.num_addressable_devices == 0) throw ArtifactError(plugin + " has no devices");
    device = devices.addressable_devices[0];
  }

  ~Client() {
    JAXREC_PJRT_ARGS(PJRT_Client_Destroy_Args, args);
    args.client = client;
    api.ignore(api->PJRT_Client_Destroy(&args));
  }
};

// A buffer of the plugin: over memory of the caller, or a result of a program.
class PjrtArray final : public RuntimeArray {
 public:
  PjrtArray(std::shared_ptr<const Client> client, const HostArray& array)
      : client_(std::move(client)), bytes_(bytes_of(array.dtype, array.shape)) {
    JAXREC_PJRT_ARGS(PJRT_Client_BufferFromHostBuffer_Args, args);
    args.client = client_->client;
    args.data = array.data;
    args.type = type_of(array.dtype);
    args.dims = array.shape.data();
    args.num_dims = array.shape.size();
    args.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableZeroCopy;
    args.device = client_->device;
    client_->api.check(client_->api->PJRT_Client_BufferFromHostBuffer(&args));
    if (args.done_with_host_buffer != nullptr) client_->api.destroy(args.done_with_host_buffer);
    buffer_ = args.buffer;
    data_ = static_cast<const std::byte*>(array.data);
  }

  // Takes the buffer of a result that is complete.
  PjrtArray(std::shared_ptr<const Client> client, PJRT_Buffer* result, size_t bytes)
      : client_(std::move(client)), buffer_(result), bytes_(bytes) {}

  ~PjrtArray() override { client_->api.destroy(buffer_); }

  // Finds where a result lies in this process's memory: a copy by the plugin would switch threads.
  void find_data() {
    JAXREC_PJRT_ARGS(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args, place);
    place.buffer = buffer_;
    client_->api.check(client_->api->PJRT_Buffer_OpaqueDeviceMemoryDataPointer(&place));
    data_ = static_cast<const std::byte*>(place.device_memory_ptr);
  }

  const std::byte* data() const override { return data_; }
  size_t bytes() const override { return bytes_; }
  PJRT_Buffer* buffer() const { return buffer_; }

 private:
  const std::shared_ptr<const Client> client_;
  PJRT_Buffer* buffer_ = nullptr;
  const std::byte* data_ = nullptr;
  const size_t bytes_;
};

class PjrtExecutable final : public Executable {
 public:
  PjrtExecutable(std::shared_ptr<const Client> client, std::string_view code,
                 const std::vector<ResultSpec>& results)
      : client_(std::move(client)) {
    JAXREC_PJRT_ARGS(PJRT_Program, program);
    constexpr std::string_view format = "mlir";
    std::string copy(code);  // the interface takes memory that could be written to
    program.code = copy.data();
    program.code_size = copy.size();
    program.format = format.data();
    program.format_size = format.size();
    JAXREC_PJRT_ARGS(PJRT_Client_Compile_Args, args);
    args.client = client_->client;
    args.program = &program;
    args.compile_options = kCompileOptions;
    args.compile_options_size = sizeof kCompileOptions;
    client_->api.check(client_->api->PJRT_Client_Compile(&args));
    executable_ = args.executable;
    try {
      check_results(results);
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~PjrtExecutable() override { destroy(); }

  RuntimeArrays run(const Arguments& arguments) const override {
    const Api& api = client_->api;
    std::vector<PJRT_Buffer*> inputs;
    for (const RuntimeArray* each : arguments) {
      inputs.push_back(static_cast<const PjrtArray&>(*each).buffer());
    }
    std::vector<PJRT_Buffer*> outputs(sizes_.size());
    PJRT_Buffer* const* const argument_list = inputs.data();
    PJRT_Buffer** const output_list = outputs.data();
    PJRT_Event* done = nullptr;
    JAXREC_PJRT_ARGS(PJRT_ExecuteOptions, options);
    JAXREC_PJRT_ARGS(PJRT_LoadedExecutable_Execute_Args, args);
    args.executable = executable_;
    args.options = &options;
    args.argument_lists = &argument_list;
    args.num_devices = 1;
    args.num_args = inputs.size();
    args.output_lists = &output_list;
    args.device_complete_events = &done;
    api.check(api->PJRT_LoadedExecutable_Execute(&args));
    std::vector<std::unique_ptr<PjrtArray>> arrays;
    for (size_t i = 0; i < outputs.size(); ++i) {
      arrays.push_back(std::make_unique<PjrtArray>(client_, outputs[i], sizes_[i]));
    }
    // Arguments may lie in memory of the caller, so that even a failed run must end before it
    // returns.
    api.await(done);
    RuntimeArrays results;
    for (auto& each : arrays) {
      each->find_data();
      results.push_back(std::move(each));
    }
    return results;
  }

 private:
  void check_results(const std::vector<ResultSpec>& results) {
    const Api& api = client_->api;
    JAXREC_PJRT_ARGS(PJRT_LoadedExecutable_GetExecutable_Args, get);
    get.loaded_executable = executable_;
    api.check(api->PJRT_LoadedExecutable_GetExecutable(&get));
    const auto destroy_executable = [&](PJRT_Executable* executable) {
      JAXREC_PJRT_ARGS(PJRT_Executable_Destroy_Args, args);
      args.executable = executable;
      api.ignore(api->PJRT_Executable_Destroy(&args));
    };
    const std::unique_ptr<PJRT_Executable, decltype(destroy_executable)> executable(
        get.executable, destroy_executable);
    JAXREC_PJRT_ARGS(PJRT_Executable_OutputElementTypes_Args, types);
    types.executable = get.executable;
    api.check(api->PJRT_Executable_OutputElementTypes(&types));
    JAXREC_PJRT_ARGS(PJRT_Executable_OutputDimensions_Args, dimensions);
    dimensions.executable = get.executable;
    api.check(api->PJRT_Executable_OutputDimensions(&dimensions));
    bool is_same = types.num_output_types == results.size() &&
                   dimensions.num_outputs == results.size();
    const int64_t* next = dimensions.dims;
    for (size_t i = 0; is_same && i < results.size(); ++i) {
      const std::vector<int64_t> shape(next, next + dimensions.dim_sizes[i]);
      next += dimensions.dim_sizes[i];
      is_same = types.output_types[i] == type_of(results[i].dtype) && shape == results[i].shape;
    }
    if (!is_same) throw ArtifactError("the program returns other outputs than the manifest lists");
    for (const ResultSpec& result : results) {
      sizes_.push_back(bytes_of(result.dtype, result.shape));
    }
  }

  void destroy() {
    JAXREC_PJRT_ARGS(PJRT_LoadedExecutable_Destroy_Args, args);
    args.executable = executable_;
    client_->api.ignore(client_->api->PJRT_LoadedExecutable_Destroy(&args));
  }

  const std::shared_ptr<const Client> client_;
  PJRT_LoadedExecutable* executable_ = nullptr;
  std::vector<size_t> sizes_;  // bytes of each result
};

class PjrtRuntime final : public Runtime {
 public:
  explicit PjrtRuntime(const RuntimeOptions& options)
      : client_(std::make_shared<Client>(options.plugin)), library_(options.native_library) {
    for (auto* each = client_->api->extension_start; each != nullptr; each = each->next) {
      if (each->type == PJRT_Extension_Type_FFI) ffi_ = reinterpret_cast<PJRT_FFI_Extension*>(each);
    }
  }

  void register_target(const std::string& target) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (registered_.count(target) > 0) return;
    if (ffi_ == nullptr || ffi_->register_handler == nullptr) {
      throw ArtifactError("the PJRT plugin lacks the FFI extension, by which programs call jaxrec's "
                          "native library; take a plugin that has it");
    }
    PJRT_FFI_Register_Handler_Args args{};
    args.struct_size = PJRT_FFI_Register_Handler_Args_STRUCT_SIZE;
    args.target_name = target.data();
    args.target_name_size = target.size();
    args.handler = library_.handler(target);
    args.platform_name = kPlatform.data();
    args.platform_name_size = kPlatform.size();
    client_->api.check(ffi_->register_handler(&args));
    registered_[target] = args.handler;
  }

  std::unique_ptr<const RuntimeArray> share(const HostArray& array) const override {
    return std::make_unique<PjrtArray>(client_, array);
  }

  std::unique_ptr<Executable> compile(std::string_view stablehlo,
                                      const std::vector<ResultSpec>& results) override {
    return std::make_unique<PjrtExecutable>(client_, stablehlo, results);
  }

 private:
  const std::shared_ptr<const Client> client_;
  NativeLibrary library_;
  PJRT_FFI_Extension* ffi_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, void*> registered_;
};

}  // namespace

std::shared_ptr<Runtime> Runtime::open(const RuntimeOptions& options) {
  if (options.plugin.empty()) {
    throw ArtifactError("no PJRT plugin is given; see docs/serving.md for one from PyPI");
  }
  return std::make_shared<PjrtRuntime>(options);
}

}  // namespace jaxrec::serving
