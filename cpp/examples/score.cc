// Prints the scores of a request: score PLUGIN NATIVE_LIBRARY MODEL REQUEST
#include <cstdio>
#include <exception>

#include "jaxrec/serving/model.h"

int main(int argc, char** argv) {
  namespace serving = jaxrec::serving;
  if (argc != 5) return 2;
  try {
    const auto model = serving::Model::load(argv[3], serving::Runtime::open({argv[1], argv[2]}));
    const auto request = model->decode(argv[4]);
    std::puts(serving::to_json(model->manifest(), model->predict(request)).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
