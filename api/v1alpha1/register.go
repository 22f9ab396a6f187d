package v1alpha1

import (
	"embed"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of this package's types.
var GroupVersion = schema.GroupVersion{Group: "ashlar.dev", Version: "v1alpha1"}

// CRDs has the generated CustomResourceDefinitions, in files crds/*.yaml.
//
//go:embed crds/*.yaml
var CRDs embed.FS

// AddToScheme adds this package's types to a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &GPUNode{}, &GPUNodeList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
